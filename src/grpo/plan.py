"""Memory, communication and arithmetic of a training, before anything is rented.

``grpo plan --policy 7B --gpus 8 --gpu h100 --zero 2`` says what each GPU would hold, whether it fits and what would
make it fit, what a round sends and computes, and what would take longest. ``--json`` gives the same as numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser

from grpo.planning.advice import advice
from grpo.planning.machines import MACHINES, machine_of
from grpo.planning.memory import plan_memory
from grpo.planning.page import RESERVE, as_json, markdown_tables, named_sizes, show
from grpo.planning.shapes import read_shape
from grpo.planning.traffic import Assumptions, plan_traffic
from grpo.planning.workload import PlanError, Workload


def main(argv: list[str]) -> None:
    """The ``grpo plan`` command."""
    values = _parser().parse_args(argv)
    if values.tables:
        print(markdown_tables(), end="")
        return
    if values.policy is None:
        raise PlanError(f"policy is not given: name a policy folder, a config.json, or one of {named_sizes()}")
    instantiated = {name: getattr(values, name) for name in Workload.__dataclass_fields__}
    _plan(values, Workload(**instantiated), Assumptions(**values.assumptions.as_dict()))


def _plan(values: Any, workload: Workload, assumed: Assumptions) -> None:
    machine = machine_of(values.gpu)
    if values.gpu_memory is not None:
        machine = replace(machine, memory=values.gpu_memory * 1e9)
    reserve = int(values.reserve * 1e9)
    shape = read_shape(values.policy)
    memory = plan_memory(shape, workload, reserve)
    traffic = plan_traffic(shape, workload, machine, assumed)
    advised = [] if memory.total <= machine.memory else advice(shape, workload, reserve, machine.memory)
    if values.json:
        print(json.dumps(as_json(shape, workload, machine, memory, traffic) | {"advice": advised}, indent=2))
    else:
        show(shape, workload, machine, memory, traffic, advised)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="grpo plan", description=__doc__)
    parser.add_argument("--config", action="config", help="a file of these settings")
    parser.add_argument("--policy", type=str | None, default=None, help=f"folder, config.json, or {named_sizes()}")
    parser.add_argument("--gpu", type=str, default="h100", help=f"one of {', '.join(MACHINES)}")
    parser.add_argument("--gpu_memory", type=float | None, default=None, help="GB of 10^9, where it differs")
    parser.add_argument("--reserve", type=float, default=RESERVE / 1e9, help="GB for CUDA itself and fragmentation")
    parser.add_argument("--json", action="store_true", help="numbers instead of a page")
    parser.add_argument("--tables", action="store_true", help="the tables of docs/scaling.md, and nothing else")
    parser.add_class_arguments(Workload)
    parser.add_class_arguments(Assumptions, "assumptions")
    return parser
