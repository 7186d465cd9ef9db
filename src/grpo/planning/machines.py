"""Kinds of GPU by name, with the numbers of their public data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.planning.workload import PlanError


@dataclass(frozen=True)
class Machine:
    """One GPU and its neighbours' roads.

    Args:
        name: for the page.
        memory: bytes.
        bf16: floating-point operations a second in bfloat16, dense.
        fp32: the same in float32, without TF32, which torch leaves off.
        bandwidth: bytes a second of its own memory.
        neighbours: bytes a second one way to the GPUs of the same host.
        network: bytes a second one way to other hosts, each GPU's share; an assumption.
        host: bytes a second one way to the host's memory.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    neighbours: float
    network: float
    host: float


_NETWORK = 50e9  # 400 Gbit/s a GPU, as clusters of the larger classes have; a cloud's cheaper machines have far less
_SLOW_NETWORK = 3e9  # 25 Gbit/s a machine
_PCIE4, _PCIE5 = 32e9, 64e9  # sixteen lanes, one way, before overhead

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("l4", 24e9, 121e12, 30.3e12, 300e9, _PCIE4, _SLOW_NETWORK, _PCIE4),
        Machine("rtx4090", 24e9, 165e12, 82.6e12, 1008e9, _PCIE4, _SLOW_NETWORK, _PCIE4),
        Machine("l40s", 48e9, 362e12, 91.6e12, 864e9, _PCIE4, _SLOW_NETWORK, _PCIE4),
        Machine("a100-40gb", 40e9, 312e12, 19.5e12, 1555e9, 300e9, _NETWORK / 2, _PCIE4),
        Machine("a100-80gb", 80e9, 312e12, 19.5e12, 2039e9, 300e9, _NETWORK / 2, _PCIE4),
        Machine("h100", 80e9, 989e12, 67e12, 3350e9, 450e9, _NETWORK, _PCIE5),
        Machine("h200", 141e9, 989e12, 67e12, 4800e9, 450e9, _NETWORK, _PCIE5),
    )
}


def machine_of(name: str) -> Machine:
    """The machine of this name.

    Raises:
        PlanError: there is none.
    """
    if name not in MACHINES:
        raise PlanError(f"gpu is {name}: choose one of {', '.join(MACHINES)}")
    return MACHINES[name]
