"""Generate text with a model on one chip, or split over the chips that launch.py starts a process for.

    python examples/generate.py MODEL --prompt "The capital of France is"
    python examples/launch.py --nproc_per_node 4 examples/generate.py MODEL --prompt "The capital of France is"

MODEL is a folder or a Hub name. Runs on the TPU where there is one, else emulated on CPU.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

warnings.filterwarnings("ignore", message="<TorchTpu/Performance")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import tpu_kernels


def load(name: str, processes: int) -> Any:
    """The model on this process's chip: whole, or this process's share of it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "tpu" if accelerator is not None and accelerator.type == "tpu" else "cpu"
    options: dict[str, Any] = {"attn_implementation": "tpu_attention", "dtype": torch.float32 if device == "cpu" else "auto"}
    if processes == 1:
        # Say "tpu". "auto" asks accelerate, which may not know the device and then loads on CPU without a word.
        return AutoModelForCausalLM.from_pretrained(name, device_map=device, **options).eval()
    # No device_map here: transformers places each process's share on its chip. The plan replicates attention where the
    # model has fewer KV heads than there are processes.
    plan = tpu_kernels.tensor_parallel_plan(AutoConfig.from_pretrained(name), processes)
    distributed = DistributedConfig(tp_size=processes, tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed, **options).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text, on one chip or several.")
    parser.add_argument("model")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="do not compile decoding (disable_compile=True)")
    options = parser.parse_args()

    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    tpu_kernels.register()
    model = load(options.model, processes)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    # Inputs stay on CPU: generate() moves what each step needs, and its own bookkeeping (which token comes next, whether to
    # stop) then compiles nothing on the TPU.
    inputs = tokenizer(options.prompt, return_tensors="pt", padding=True)
    longest = inputs["input_ids"].shape[1]
    buckets = tpu_kernels.PromptBuckets.up_to(longest, options.max_new_tokens, shortest=64)
    padded = buckets.pad({name: inputs[name] for name in ("input_ids", "attention_mask")}, tokenizer.pad_token_id)
    with torch.no_grad():
        out = model.generate(
            **padded,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            # One cache length for all steps, so decoding is one program, which transformers compiles by itself on a TPU.
            # The first step waits for that; --eager compiles each operation instead, for a short look or to debug.
            past_key_values=buckets.cache(model.config),
            disable_compile=options.eager,
        )
    explained = tpu_kernels.gather_explanations(model) if processes > 1 else tpu_kernels.explain(model)
    if rank == 0:
        for text in tokenizer.batch_decode(out, skip_special_tokens=True):
            print(text)
        print(explained)
    if processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
