"""``moegraft doctor``: versions, devices, what the plan would choose, known problems."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moegraft.cli.output import Outcome, check_mark, head, lines, stdout_console, step
from moegraft.env import forced_backend, log_level
from moegraft.errors import MoegraftError

#: A layer of Qwen3-30B-A3B: what people serve.
_LAYER: dict[str, Any] = {"top_k": 8, "num_experts": 128, "hidden": 2048, "intermediate": 768}
_PHASES = {"decode": 8, "prefill": 512}
_DTYPES = ("bfloat16", "float32")
#: Compute capability of the GPUs that have prefill kernels of their own.
_HOPPER = "9.0"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Show versions, devices, the backend each device would use and why, and known problems."""
    from moegraft.cli import machine

    with step("Looking at the machine"):
        document: dict[str, Any] = {
            "versions": machine.versions(),
            "cpu": machine.cpu(),
            "cuda": machine.cuda_devices(),
            "cuda_compiler": machine.cuda_compiler(),
        }
        document["plans"] = _plans(["cpu", *(["cuda"] if document["cuda"] else [])])
    document["problems"] = find_problems(document)
    if not as_json:
        _render(stdout_console(), document)
    return Outcome(document)


def _plans(devices: list[str]) -> list[dict[str, Any]]:
    """Ask the plan for a typical layer on each device, in each dtype and phase."""
    from moegraft.plan import make_plan
    from moegraft.problem import Problem

    found = []
    for device in devices:
        for dtype in _DTYPES:
            for phase, tokens in _PHASES.items():
                problem = Problem(
                    num_tokens=tokens,
                    gated=True,
                    dtype=dtype,
                    weight_format="unquantized",
                    device_type=device,
                    max_rank=16,
                    **_LAYER,
                )
                entry: dict[str, Any] = {"device": device, "dtype": dtype, "phase": phase}
                try:
                    plan = make_plan(problem)
                    entry |= {"backend": plan.backend, "reasons": list(plan.reasons)}
                except MoegraftError as error:
                    entry |= {"backend": None, "reasons": [str(error)]}
                found.append({**entry, "tokens": tokens})
    return found


def find_problems(document: dict[str, Any]) -> list[dict[str, str]]:
    """Return known problems of a machine, each with what to do."""
    from moegraft.cli.machine import has_nvidia_driver, older, requirements

    found: list[dict[str, str]] = []

    def add(problem: str, remedy: str) -> None:
        found.append({"problem": problem, "remedy": remedy})

    versions, cpu, cuda = document["versions"], document["cpu"], document["cuda"]
    for package, lowest in requirements().items():
        version = versions.get(package)
        if version is not None and older(version, lowest):
            add(
                f"{package} {version} is older than {lowest}, the oldest supported",
                f"pip install --upgrade '{package}>={lowest}'",
            )
    if versions["transformers"] is None:
        add(
            "transformers is not installed: moegraft.attach has no model to attach to",
            "pip install -e '.[transformers]' in the clone of moegraft",
        )
    if versions["peft"] is None:
        add(
            "peft is not installed: `moegraft demo` has nothing to compare with (serving needs no "
            "peft)",
            "pip install -e '.[demo]' in the clone of moegraft",
        )
    if has_nvidia_driver() and not cuda:
        add(
            f"there is an NVIDIA driver, but torch {versions['torch']} sees no CUDA device",
            "install a CUDA build of torch that fits the driver (see pytorch.org), and check "
            "CUDA_VISIBLE_DEVICES",
        )
    if cuda and versions["triton"] is None:
        add("triton is not installed: no GPU kernels", "pip install triton")
    hoppers = [gpu for gpu in cuda if gpu.get("capability") == _HOPPER]
    if hoppers and document["cuda_compiler"]["nvrtc"] is None:
        add(
            f"no compiled prefill kernels ({document['cuda_compiler']['why_not'].rstrip('.')}): "
            "long prompts run on the portable Triton kernels, which is slower on "
            f"{hoppers[0]['name']}",
            "install a CUDA build of torch, or pip install nvidia-cuda-nvrtc",
        )
    kernels = cpu["compiled_kernels"]
    if kernels["instructions"] is None:
        setting, compiler = os.environ.get("MOEGRAFT_COMPILE"), os.environ.get("CXX")
        remedy = "install a C++ compiler with OpenMP (such as g++), or ignore it where a GPU serves"
        if setting:
            remedy = f"unset MOEGRAFT_COMPILE, which is {setting!r}"
        elif compiler:
            remedy = f"correct or unset CXX, which is {compiler!r}"
        add(
            f"no compiled CPU kernels ({kernels['why_not']}): layers run on torch's operators, "
            "which is slower, or not at all with a setting that is refused",
            remedy,
        )
        if cpu["fast_bfloat16"] is False:
            add(
                "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16): bfloat16 is slow "
                "in torch",
                "load models in float32 on the CPU where memory allows",
            )
    if cpu["cores"] and cpu["torch_threads"] > cpu["cores"]:
        add(
            f"torch uses {cpu['torch_threads']} threads on {cpu['cores']} usable cores",
            f"set OMP_NUM_THREADS={cpu['cores']}",
        )
    forced = forced_backend()
    if forced:
        add(f"MOEGRAFT_BACKEND={forced} overrides the plan's choice", "unset MOEGRAFT_BACKEND")
    try:
        log_level()
    except MoegraftError as error:
        add(str(error).rstrip("."), "set MOEGRAFT_LOG to a level, or unset it")
    for device in sorted({p["device"] for p in document["plans"] if p["backend"] is None}):
        add(f"no backend runs a layer on {device}", "see the reasons above; use another device")
    return found


def _render(console: Console, document: dict[str, Any]) -> None:
    head(console, "Versions")
    grid = Table.grid(padding=(0, 2))
    for package, version in document["versions"].items():
        known = Text(version) if version else Text("not installed", style="yellow")
        grid.add_row(f"  {package}", known)
    console.print(grid)
    head(console, "Devices")
    cpu = document["cpu"]
    features = ", ".join(cpu["features"]) or cpu["torch_capability"]
    devices = [
        f"cpu: {cpu['name']}; {cpu['cores']} cores, {cpu['torch_threads']} threads; {features}; "
        f"compiled kernels: {cpu['compiled_kernels']['instructions'] or 'none'}"
    ]
    nvrtc = document["cuda_compiler"]["nvrtc"]
    compiler = f"NVRTC {nvrtc}" if nvrtc else "none, Triton's run"
    devices += [
        f"cuda:{gpu['index']}: {gpu['name']}; {gpu['memory_bytes'] / 2**30:.1f} GiB; capability "
        f"{gpu['capability']}"
        + (f"; compiled prefill kernels: {compiler}" if gpu["capability"] == _HOPPER else "")
        for gpu in document["cuda"]
    ] or ["cuda: none"]
    lines(console, devices)
    size = " ".join(f"{name}={value}" for name, value in _LAYER.items())
    head(console, "What the plan chooses for one MoE layer")
    lines(console, [size])
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("device", "dtype", "tokens", "backend", "why"):
        table.add_column(name)
    for plan in document["plans"]:
        backend = Text(plan["backend"]) if plan["backend"] else Text("none", style="bold red")
        tokens = f"{plan['tokens']} ({plan['phase']})"
        why = Text("\n".join(plan["reasons"]))
        table.add_row(plan["device"], plan["dtype"], tokens, backend, why)
    console.print(table)
    head(console, "Problems")
    for entry in document["problems"]:
        lines(console, [entry["problem"]], style="yellow")
        lines(console, [f"-> {entry['remedy']}"], indent=4)
    if not document["problems"]:
        console.print(Text("  "), check_mark(console, True), "none known")
