"""The prose of docs/evidence.md; `report.py` puts tables and plots between."""

HEAD = """# What the mismatch does to learning

<!-- Made by experiments/mismatch/report.py from experiments/mismatch/results; change those, not this. -->

SmolLM2-135M-Instruct learns to add up lists of numbers step by step, in completions of several hundred tokens in which
nothing after the first mistake counts (`experiments/mismatch/task.py`). Arms differ in nothing but the flow and the
correction; all begin from the same weights, see the same problems in the order of their seed, and are evaluated on the same
held-out problems. `-mini` arms take several optimizer steps for one rollout. The configuration is
`experiments/mismatch/config.yaml`, what the arms change `arms.py`.

```sh
python experiments/mismatch/drive.py --model models/smollm2-135m-instruct --out runs/mismatch --arms all --steps 50 \\
    --slice 50 --jobs 9 --minutes 20 --tidy
python experiments/mismatch/drive.py --model models/smollm2-135m-instruct --out runs/mismatch --jobs 2 --resume-check
cp runs/mismatch/results/*.json experiments/mismatch/results/
python experiments/mismatch/report.py
```

The first command stops at checkpoints when its minutes are over, and goes on from there when given again. Jobs share a GPU best
under CUDA's multi-process service.
"""
NOT_RUN = """
**The experiment has not been run yet**: there are no results, so there is nothing to say.
"""
TERMS = """
## How to read it

- The spread behind ± is the standard deviation over seeds; thin lines in the plots are seeds, thick ones their mean. With
  three seeds, arms whose spreads overlap have not been told apart.
- *whole run* is the mean over all steps, so it also counts how fast an arm learns; *end* is the last tenth of the planned
  steps. The reward is the share of lines right before the first mistake, of completions sampled at temperature 1.
- *gained*: the last held-out result less that of the starting weights, both sampled and scored under the arm's own flow of the
  rollout. The starting weights were made in BF16, and the same weights score lower in FP8 before any step.
- *cosine*: of the gradient that the update follows with the one that a BF16 trainer takes from all samples of the same
  rollout, nothing corrected, nothing rejected. In the uncorrected split flow that is its own gradient, and the cosine is 1 by
  construction. *weighted*: the BF16 gradient has every token weighted by its untruncated ratio of BF16 policy over rollout,
  so it knows the sampler's bias as far as a token's own ratio does. Both are of the first mini-batch of a step, before the
  optimizer moves (`experiments/mismatch/probe.py`).
- *clipped*: tokens at the bounds of the loss's importance ratio. It is 0 with one optimizer step a rollout.
- Runs shared one GPU, several at a time: their seconds say nothing about speed.
"""
LIMITS = """
What the runs don't show:

- Anything about other models, tasks and lengths. This is one model of 135 million parameters, whose weights FP8 hurts more than
  it hurts large ones, one task, completions of some 250 tokens, and steps that end while rewards still rise.
- That FP8 is free. `exact` removes the difference between rollout and trainer, not what quantized weights, activations and keys
  cost a small model: `bf16` stays ahead from the starting weights on.
- Small differences: three seeds tell apart what differs in all of them. Nor what corrections can do at their best: their
  thresholds were not tuned.
"""
