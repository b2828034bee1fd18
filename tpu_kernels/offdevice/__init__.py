"""What can be proved about a TPU with no TPU.

* `targets`: the generations and their figures.
* `aot`: compile a kernel function, or a StableHLO module, for a generation: does it, and in what memory.
* `emit`: the StableHLO that torch_tpu itself makes for a torch function or a whole model, kernels included.
* `schedule`: the time that the compiler's own VLIW schedule of a program takes (a "static schedule").
* `plan`: which kernel each attention call of a model takes, and all of the above for it.

Everything that loads libtpu or torch_tpu runs in subprocesses (`process`, `worker`) with the environment it
needs. No device is opened, no metadata server is asked. Importing this package imports neither jax nor torch.
"""
