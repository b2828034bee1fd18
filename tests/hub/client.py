"""Run as a program: a server that runs each job (a JSON line) in a process of its own, forked after torch was imported.

huggingface_hub and kernels read their environment when they are imported, so every job needs a process that has not
imported them; importing torch and everything else anew each time would make the tests slow. A job names an environment,
a folder to work in, calls (functions of this file with their arguments) and a file for what the calls return, as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def load(folder: str, threads: int = 1) -> dict[str, object]:
    """hub.load_kernel; what came, or how it failed, and what was logged."""
    from tpu_kernels import hub
    from tpu_kernels.specs import read_spec

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tpu_kernels").addHandler(handler)
    spec, got = read_spec(Path(folder)), []
    before = set(sys.modules)

    def attempt() -> None:
        try:
            got.append(hub.load_kernel(spec))
        except hub.KernelLoadError as error:
            got.append(error)

    started = time.monotonic()
    running = [threading.Thread(target=attempt) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seconds = time.monotonic() - started
    logging.getLogger("tpu_kernels").removeHandler(handler)
    first = got[0]
    result: dict[str, object] = {"warnings": told, "seconds": seconds}
    if isinstance(first, Exception):
        left = [name for name in set(sys.modules) - before if name.startswith("_small_kernel")]
        return result | {"error": str(first), "cause": type(first.__cause__).__name__, "left": left}
    return result | {
        "source": first.source,
        "revision": first.revision,
        "why": first.why,
        "location": first.location,
        "value": first.module.forward(),
        "same": all(each is first for each in got),
    }


def prefetch(folder: str) -> dict[str, object]:
    """hub.prepare with everything."""
    from tpu_kernels import hub
    from tpu_kernels.specs import read_spec

    try:
        build = hub.prepare(read_spec(Path(folder)), everything=True)
    except hub.KernelLoadError as error:
        return {"error": str(error)}
    return {"source": build.source, "revision": build.revision, "folder": str(build.folder)}


def stock(repo: str, version: int | None = None, revision: str | None = None) -> dict[str, object]:
    """kernels.get_kernel itself, seeing a TPU, as on a host where detection works."""
    import types

    import kernels
    import torch

    torch.backends.tpu = types.ModuleType("torch.backends.tpu")
    try:
        module = kernels.get_kernel(repo, version=version, revision=revision)
    except Exception as error:  # whatever it is, the test looks at it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": module.forward(), "file": str(module.__file__)}


def attention(folder: str) -> dict[str, object]:
    """A causal call of the range-attention kernel that the spec in `folder` stands for, emulated; its error against SDPA."""
    import jax.numpy as jnp
    import numpy
    import torch

    from tpu_kernels import hub
    from tpu_kernels.specs import read_spec

    kernel = hub.load_kernel(read_spec(Path(folder)))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    starts, ends = jnp.zeros((1, 40), jnp.int32), jnp.arange(1, 41, dtype=jnp.int32)[None]
    out = kernel.module.forward(
        *(jnp.asarray(each.numpy()) for each in (q, k, v)), starts, ends, None, None, scale=32**-0.5, softcap=0.0,
        block_q=0, block_kv=0, precision="highest", vmem_bytes=0, interpret=True,
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    result = numpy.array(out)
    error = float((torch.from_numpy(result) - expected).abs().max())
    return {"source": kernel.source, "revision": kernel.revision, "out": result.tobytes().hex(), "error": error}


def model(folder: str) -> dict[str, object]:
    """A model made from the config.json in `folder`, asked for tpu_attention, and run."""
    import kernels
    import torch
    import transformers

    import tpu_kernels

    tpu_kernels.register()
    config = transformers.AutoConfig.from_pretrained(folder)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tpu_attention").eval()
    with torch.no_grad():
        made(torch.zeros(1, 8, dtype=torch.int64))
    return {
        "attention": made.config._attn_implementation,
        "reasons": sorted({row.reason for row in tpu_kernels.explain(made).rows}),
        "kernels": sorted(str(known.metadata.name) for known in kernels.get_loaded_kernels()),
    }


def stock_model(repo: str, model_type: str, sees_tpu: bool = False) -> dict[str, object]:
    """A tiny model of transformers alone, with attn_implementation=repo, emulated, beside "eager": prefill, padded prefill,
    and decoding with a static cache. sees_tpu: kernels finds a TPU, as on a host where its detection works."""
    import types

    import torch
    import transformers

    torch.set_num_threads(1)
    if sees_tpu:
        torch.backends.tpu = types.ModuleType("torch.backends.tpu")
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=256, pad_token_id=0, eos_token_id=None,
        sliding_window=6,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.arange(3, 25).reshape(2, 11)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    results: dict[str, list[torch.Tensor]] = {}
    taken: list[bool] = []
    try:
        for name in ("eager", repo):
            model.set_attn_implementation(name)
            if name == repo:
                taken = _count_kernel_calls()
            with torch.no_grad():
                results[name] = [model(ids).logits, model(ids, attention_mask=padding).logits[1, 4:]]
                for mask in (None, padding):
                    made = model.generate(
                        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, cache_implementation="static",
                        return_dict_in_generate=True, output_logits=True,
                    )  # fmt: skip
                    results[name] += [made.sequences, *made.logits]
    except Exception as error:  # whatever it is, the test looks at it
        return {"error": f"{type(error).__name__}: {error}"}
    pairs = list(zip(results[repo], results["eager"], strict=True))
    return {
        "error": "",
        "compared": len(pairs),
        "difference": max(float((ours - theirs).abs().max()) for ours, theirs in pairs),
        "on_kernel": sum(taken),
        "elsewhere": len(taken) - sum(taken),
        "plugin": [name for name in sys.modules if name.partition(".")[0] == "tpu_kernels"],
    }


def _count_kernel_calls() -> list[bool]:
    """One entry a call of the range-attention module from now on: whether its kernel took it."""
    import kernels

    (loaded,) = kernels.get_loaded_kernels()
    binding = sys.modules[f"{loaded.module.__name__}.torch_binding"]
    calls, decide = [], binding._kernel_can

    def record(*arguments: object) -> bool:
        calls.append(decide(*arguments))
        return calls[-1]

    binding._kernel_can = record
    return calls


def stock_trace(repo: str) -> dict[str, object]:
    """A decoding step with a static cache on fake "tpu" tensors through the real torch_tpu, of transformers alone."""
    import torch
    from torch._subclasses import FakeTensorMode
    from torch_tpu import _loader
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    _loader._init_device("tpu")
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(), torch.device("tpu"), torch.no_grad():
        config = AutoConfig.for_model(
            "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=512,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation=repo, dtype=torch.bfloat16).eval()
        compiled = torch.compile(model, fullgraph=True, backend=capture, dynamic=False)
        ids, cache = torch.zeros(2, 48, dtype=torch.int64), StaticCache(config=config, max_cache_len=256)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        out = compiled(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return {
        "device": str(out.logits.device),
        "graphs": len(graphs),
        "kernel_nodes": [node for node in nodes if "range_attention" in node],
        "sdpa_nodes": [node for node in nodes if "scaled_dot_product" in node],
        "plugin": [name for name in sys.modules if name.partition(".")[0] == "tpu_kernels"],
    }


def command(*arguments: str) -> dict[str, object]:
    """The command line `tpu-kernels`."""
    from tpu_kernels import cli

    return _command_line(cli.main, "tpu-kernels", *arguments)


def verify_some(cases: list[str], *arguments: str) -> dict[str, object]:
    """`tpu-kernels verify ARGUMENTS` with only these parity cases, so that it takes seconds."""
    import torch

    from tpu_kernels import verify

    torch.set_num_threads(1)
    chosen = [case for case in verify.parity_cases(large=False) if case.name in cases]
    assert len(chosen) == len(cases)
    verify.parity_cases = lambda large: chosen  # type: ignore[assignment]
    return command("verify", *arguments)


def install(site: str) -> None:
    """Put a folder of installed packages on the path."""
    sys.path.insert(0, site)


def kernels_command(*arguments: str) -> dict[str, object]:
    """The command line `kernels`."""
    from kernels import cli

    return _command_line(cli.main, "kernels", *arguments)


def _command_line(main: Callable[[], None], *arguments: str) -> dict[str, object]:
    sys.argv = list(arguments)
    out = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "output": out.getvalue()}


def limit_file_size(limit: int) -> None:
    """Writing past `limit` bytes in a file fails from now on, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _run(job: dict[str, object]) -> None:
    environment = job["environment"]
    assert isinstance(environment, dict)
    os.environ.update(environment)
    os.chdir(str(job["folder"]))
    results, result = [], Path(str(job["result"]))
    with result.with_suffix(".log").open("w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            for name, arguments in job["calls"]:  # type: ignore[attr-defined]
                results.append(globals()[name](*arguments))
            text = json.dumps(results)
        except BaseException:
            text = json.dumps({"crash": traceback.format_exc()})
        fresh = result.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, text.encode())
        os.rename(fresh, result)


def main() -> None:
    importlib.import_module("torch")
    importlib.import_module("tpu_kernels.download")
    importlib.import_module("kernels")
    for name in list(sys.modules):  # what reads the environment is imported anew by each job
        # kernels._rust does not, and cannot be imported twice.
        if name.partition(".")[0] in ("huggingface_hub", "kernels", "tpu_kernels") and name != "kernels._rust":
            del sys.modules[name]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: the results are files
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(json.loads(line))
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
