"""What can be proved about a TPU with no TPU.

* `targets`: the generations and their figures.
* `aot`: compile a kernel function, or a StableHLO module, for a generation: does it compile, what memory does it take.
* `emit`: the StableHLO that torch_tpu itself makes for a torch function or a whole model, with our kernels in it.
* `schedule`: the time that the compiler's own VLIW schedule of a program takes ("static schedule", not a measurement).
* `plan`: which kernel each attention call of a model takes, and all of the above for it.

Everything that loads libtpu or torch_tpu runs in subprocesses (`process`, `worker`) with the environment it needs. No
device is opened and no metadata server is asked. Importing this package imports neither jax nor torch.
"""
