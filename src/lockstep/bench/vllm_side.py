"""vLLM under the rollout benchmark's terms: offline, random ids, end tokens ignored, sampled log-probability returned.

Run as a process by `rollout.py`, which passes the job through the environment and reads one line that begins with RESULT. Compile
and CUDA graphs are on, the prefix cache is off, weights are vLLM's dummies.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.bench.rollout import Work

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main() -> None:
    """Does the job's works one after the other, each after a short warm-up, and prints a line for each."""
    job = json.loads(os.environ["LOCKSTEP_VLLM_JOB"])
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm

    works, flow = [Work(**w) for w in job["works"]], job["flow"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(job["model"], flow)))
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(w.prompt_tokens + w.new_tokens for w in works) + 64,
            gpu_memory_utilization=0.9,
            max_num_seqs=max(8, *(w.prompts for w in works)),
            enable_prefix_caching=False,
            kv_cache_dtype="fp8" if flow.endswith("kv8") else "auto",
            disable_log_stats=True,
            seed=0,
        )
        for work in works:
            prompts = [{"prompt_token_ids": ids} for ids in work.ids(job["model"]["vocab_size"])]
            seconds, tokens = 0.0, 0
            for new_tokens in (min(job["warm"], work.new_tokens), work.new_tokens):
                params = vllm.SamplingParams(
                    temperature=1.0, top_p=job["top_p"], top_k=job["top_k"],
                    max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False,
                )  # fmt: skip
                torch.cuda.synchronize()
                begun = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begun
                tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            result = {"version": vllm.__version__, "seconds": seconds, "tokens": tokens}
            print("RESULT " + json.dumps(result), flush=True)


def config(shape: dict[str, Any], flow: str) -> dict[str, Any]:
    """The shape with the quantization that a flow means to vLLM."""
    if flow == "bf16":
        return shape
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return shape | {"quantization_config": quantization}


if __name__ == "__main__":
    main()
