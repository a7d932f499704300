"""Every Triton kernel on a real GPU: is it right, and how fast is it beside torch and beside what the card can do?

    python -m benchmarks.gpu_check [--json gpu_check.json] [--only KERNEL ...] [--limit-s 460]
    python -m benchmarks.gpu_check --rehearse

Needs torch, triton and numpy, and a GPU that nothing else uses. Each kernel is compared with its reference in torch,
over odd shapes and over those it is timed at. Then it is timed, with the caches of the card cold, beside what torch
offers for the same. What the card can do is measured, too: how fast it copies memory, and how fast it multiplies large
matrices in bfloat16. *Roofline* is the share of that which a kernel reaches, of the two the one that limits it.

At the end a tiny random model runs through the whole engine and must say what transformers' `generate` says, if msgspec
and transformers are there.

`--rehearse` interprets the kernels on a CPU, with tiny shapes and without any timing: whether this script works.

Exit codes: 0, all is right (goals that are not reached are said, and no failure); 1, something is wrong or was left out
for lack of time; 2, it cannot begin: no GPU, no Triton, or arguments that mean nothing.
"""
