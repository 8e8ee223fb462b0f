"""The report's page: markup around the sections, styles and the little script. Nothing is loaded from anywhere.

The content security policy in the head forbids every outside resource, so that a completion that contains markup, even
if it were not escaped, could not reach the network. Without scripts the page still shows everything; the script only
adds tooltips and the samples' filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#f6f6f4;--card:#fff;--ink:#16181d;--soft:#5b616e;--line:#e3e3df;--grid:#ececea;
--good:#0f7b45;--good-bg:#e4f5ec;--warn:#8a5300;--warn-bg:#fdf1dc;--bad:#b3261e;--bad-bg:#fde8e6;--plain-bg:#eeeeec;
--c1:#2a78d6;--c2:#e0602a;--c3:#179a69;--c4:#c98a00;--c5:#6a55c9;--c6:#d1548d;--c7:#5f7d1f;--c8:#7b8190}
@media (prefers-color-scheme:dark){:root{--bg:#101216;--card:#181b21;--ink:#e9eaee;--soft:#9ba2b0;--line:#2a2e37;
--grid:#252932;--good:#5fd39a;--good-bg:#12291f;--warn:#f0b860;--warn-bg:#2d2313;--bad:#ff8a80;--bad-bg:#331a19;
--plain-bg:#22262e;--c1:#5aa2f5;--c2:#f0864f;--c3:#35c08c;--c4:#e0aa33;--c5:#a295f2;--c6:#ec7fb0;--c7:#a3c558;
--c8:#8c93a3}}
*{box-sizing:border-box}
[hidden]{display:none!important}
html{scroll-behavior:smooth;scroll-padding-top:56px;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.wide{max-width:1280px;margin:0 auto;padding:0 20px}
header.wide{padding-top:32px}
.eyebrow{margin:0;color:var(--soft);font-size:13px}
h1{margin:2px 0 4px;font-size:30px;line-height:1.2;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:36px 0 12px;font-size:19px}
h3{margin:0;font-size:15px}
.facts{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0;padding:0;list-style:none;color:var(--soft)}
.facts li{overflow-wrap:anywhere;min-width:0}
.facts b{color:var(--ink);font-weight:600}
.verdict{display:flex;gap:12px;align-items:flex-start;margin:18px 0;padding:14px 16px;border-radius:12px;
background:var(--plain-bg)}
.verdict svg{flex:none;width:24px;height:24px}
.verdict strong{display:block;font-size:17px;line-height:1.4}
.verdict span{color:var(--soft)}
.verdict.good{background:var(--good-bg)}.verdict.good svg,.verdict.good strong{color:var(--good)}
.verdict.warn{background:var(--warn-bg)}.verdict.warn svg,.verdict.warn strong{color:var(--warn)}
.verdict.bad{background:var(--bad-bg)}.verdict.bad svg,.verdict.bad strong{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px;margin:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tiles .card{padding:12px 14px;min-width:0}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:20px;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.tiles dd small{display:block;font-size:13px;font-weight:400;color:var(--soft)}
nav{position:sticky;top:0;z-index:5;background:var(--bg);border-bottom:1px solid var(--line);margin-top:20px}
nav .wide{display:flex;gap:18px;overflow-x:auto}
nav a{padding:11px 0;color:var(--soft);text-decoration:none;white-space:nowrap}
nav a:hover{color:var(--ink)}
a:focus-visible,.canvas:focus-visible,select:focus-visible,input:focus-visible,button:focus-visible,
summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--c1);outline-offset:2px;border-radius:4px}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:14px}
.plot{margin:0;padding:14px 14px 8px;display:flex;flex-direction:column;min-width:0}
.plot figcaption{flex:1}
.plot figcaption p{margin:0;color:var(--soft);font-size:13px;line-height:1.4}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 4px;padding:0;list-style:none;font-size:13px;
color:var(--soft)}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.key{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;
background:currentColor}
.key.faint{opacity:.4}
.cross::before{content:"\\00d7";color:var(--bad);font-weight:700;font-style:normal;margin-right:4px}
.canvas{position:relative;touch-action:pan-y}
.canvas svg{display:block;width:100%;height:auto}
.glass{position:absolute;inset:0}
.rule{position:absolute;top:5%;bottom:12%;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;top:0;opacity:.95;z-index:2;padding:6px 9px;border-radius:8px;background:var(--ink);color:var(--card);
font-size:12px;line-height:1.5;white-space:nowrap;pointer-events:none;font-variant-numeric:tabular-nums}
.tip div{display:flex;gap:10px;justify-content:space-between}
.tip i{align-self:center;flex:none;width:8px;height:8px;border-radius:50%;margin-right:-4px;background:currentColor}
.tip div span{flex:1}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}.c8{color:var(--c8)}
svg .line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .dense{stroke-width:1.2}
svg .faint{opacity:.38;stroke-width:1.3}
svg .faint.dense{stroke-width:1}
svg .area,svg circle{fill:currentColor}
svg .grid{stroke:var(--grid)}
svg .base{stroke:var(--soft);opacity:.55}
svg .gap{stroke:var(--soft);fill:none}
svg .bad{stroke:var(--bad);stroke-width:2;fill:none}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .y{text-anchor:end}svg .x,svg .remark{text-anchor:middle}
svg .remark{font-size:13px;fill:var(--good);font-weight:600}
.muted{color:var(--soft);margin:8px 0}
.plots+.card,.advice{margin-top:14px}
.advice{padding:2px 14px}.advice pre{padding:6px 0 14px}
.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:14px}
th{padding:9px 12px;text-align:left;font-weight:600;color:var(--soft);font-size:13px;white-space:nowrap;
border-bottom:1px solid var(--line)}
td{padding:9px 12px;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:anywhere}
tbody tr:last-child td{border-bottom:0}
.ledger td{overflow-wrap:normal;white-space:nowrap}
.ledger td:last-child{white-space:normal;min-width:200px}
.pairs td:first-child{width:1%;padding-right:32px;white-space:nowrap}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre,.text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
.text{white-space:pre-wrap;line-height:1.45}
.text summary{cursor:pointer}
.text[open] summary span{display:none}.text[open] summary::after{content:"fold";color:var(--soft)}
details.card>summary{cursor:pointer;padding:12px 14px;font-weight:600}
pre{margin:0;padding:14px;overflow-x:auto;line-height:1.5}
.controls{display:flex;flex-wrap:wrap;gap:10px 18px;align-items:center;padding:12px 14px;
border-bottom:1px solid var(--line);font-size:14px}
.controls label{display:flex;gap:8px;align-items:center;color:var(--soft)}
select,input,button{font:inherit;color:var(--ink);background:var(--bg);border:1px solid var(--line);border-radius:8px;
padding:5px 9px;max-width:100%}
button{cursor:pointer}
.samples td:nth-child(3){min-width:200px}.samples td:nth-child(4){min-width:260px}
.pill{display:inline-block;padding:1px 8px;border-radius:99px;background:var(--plain-bg);white-space:nowrap}
.pill.good{background:var(--good-bg);color:var(--good)}.pill.warn{background:var(--warn-bg);color:var(--warn)}
.pill.bad{background:var(--bad-bg);color:var(--bad)}
small.parts{display:block;color:var(--soft);white-space:pre}
footer.wide{padding-top:28px;padding-bottom:40px;color:var(--soft);font-size:13px}
@media (max-width:700px){.wide{padding:0 12px}header.wide{padding-top:20px}h1{font-size:25px}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tiles dd{font-size:19px}
.samples thead{display:none}.samples tr{display:grid;grid-template-columns:repeat(3,1fr);padding:10px 4px;
border-bottom:1px solid var(--line)}

.samples td,.samples td.num{border:0;padding:3px 10px;text-align:left;white-space:normal;min-width:0!important}
.samples td::before{content:attr(data-label);display:block;color:var(--soft);font-size:12px;font-family:system-ui}
.samples td.long{grid-column:1/-1}.samples td:nth-child(2){grid-column:span 2}}
@media print{nav,.controls,.glass{display:none}.card{break-inside:avoid}}
"""

SCRIPT = """
for(const fig of document.querySelectorAll('.plot')){
  const data=JSON.parse(fig.querySelector('script').textContent),canvas=fig.querySelector('.canvas');
  if(!data.x.length)continue;
  const rule=document.createElement('div'),tip=document.createElement('div');
  rule.className='rule';tip.className='tip';tip.setAttribute('role','status');
  rule.hidden=tip.hidden=true;canvas.append(rule,tip);
  let at=-1;
  const place=i=>data.m[0]+(data.x[i]-data.d[0])/(data.d[1]-data.d[0])*(data.m[1]-data.m[0]);
  const show=i=>{
    at=i;rule.hidden=tip.hidden=false;
    const w=canvas.clientWidth,x=place(i)*w;rule.style.left=x+'px';
    tip.replaceChildren();
    const head=document.createElement('div');head.textContent='step '+data.x[i];tip.append(head);
    for(const s of data.s){if(!s.v[i])continue;
      const row=document.createElement('div'),dot=document.createElement('i'),name=document.createElement('span'),
        value=document.createElement('b');
      dot.className='c'+s.c;name.textContent=s.n;value.textContent=s.v[i];row.append(dot,name,value);tip.append(row)}
    const room=tip.offsetWidth+12;tip.style.left=(x+room<w?x+10:Math.max(0,x-room+2))+'px'};
  const hide=()=>{at=-1;rule.hidden=tip.hidden=true};
  const near=e=>{const box=canvas.getBoundingClientRect(),f=(e.clientX-box.left)/box.width;let best=0;
    for(let i=1;i<data.x.length;i++)if(Math.abs(place(i)-f)<Math.abs(place(best)-f))best=i;show(best)};
  canvas.addEventListener('pointermove',near);canvas.addEventListener('pointerdown',near);
  canvas.addEventListener('pointerleave',hide);canvas.addEventListener('blur',hide);
  canvas.addEventListener('keydown',e=>{
    const move={ArrowLeft:-1,ArrowRight:1}[e.key];
    if(move){e.preventDefault();show(Math.min(data.x.length-1,Math.max(0,(at<0?data.x.length:at)+move)))}
    else if(e.key==='Escape')hide()});
}
const table=document.querySelector('.samples');
if(table){
  const body=table.tBodies[0],rows=[...body.rows],step=document.getElementById('by-step'),
    order=document.getElementById('by-reward'),find=document.getElementById('by-text'),
    count=document.getElementById('shown'),more=document.getElementById('more');
  const PAGE=24;let page=PAGE;
  const reward=r=>r.dataset.reward===''?NaN:+r.dataset.reward;
  const update=()=>{
    const text=find.value.toLowerCase();
    let chosen=rows.filter(r=>(step.value==='all'||r.dataset.step===step.value)
      &&(!text||r.textContent.toLowerCase().includes(text)));
    if(order.value){const sign=order.value==='high'?-1:1,
      key=r=>{const v=reward(r);return Number.isNaN(v)?Infinity:sign*v};
      chosen=chosen.map((r,i)=>[r,i]).sort((a,b)=>{const x=key(a[0]),y=key(b[0]);return x===y?a[1]-b[1]:x-y})
        .map(p=>p[0])}
    for(const r of rows)r.hidden=true;
    chosen.slice(0,page).forEach(r=>{r.hidden=false;body.append(r)});
    const n=Math.min(page,chosen.length);
    count.textContent=n===chosen.length?n+(n===1?' sample':' samples'):n+' of '+chosen.length+' samples';
    more.hidden=n===chosen.length};
  for(const control of [step,order,find])control.addEventListener('input',()=>{page=PAGE;update()});
  more.addEventListener('click',()=>{page+=PAGE;update()});
  document.querySelector('.controls').hidden=false;update();
}
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Section:
    """A heading with its markup; empty sections are left out of the page."""

    ident: str
    title: str
    body: str


def page(title: str, head: str, sections: Sequence[Section], foot: str) -> str:
    """The whole document. `head`, `foot` and the sections' bodies are markup, `title` is text."""
    shown = [section for section in sections if section.body]
    links = "".join(f'<a href="#{section.ident}">{escape(section.title)}</a>' for section in shown)
    bodies = "".join(
        f'<section id="{section.ident}" aria-labelledby="{section.ident}-h"><h2 id="{section.ident}-h">'
        f"{escape(section.title)}</h2>{section.body}</section>"
        for section in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<header class="wide">{head}</header><nav aria-label="Sections"><div class="wide">{links}</div></nav>'
        f'<main class="wide">{bodies}</main><footer class="wide">{foot}</footer>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )
