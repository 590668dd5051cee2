"""A Ray cluster of real raylets on this machine, and its worker processes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

SMALL = {"object_store_memory": 80 << 20}


class Nodes:
    """A head without CPUs, so that every task runs on a node that was added."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL}
        )
        self.nodes: list[Any] = []
        for _ in range(number):
            self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, cpus: int = 1) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=cpus, **SMALL))

    def kill(self, raylet: int) -> None:
        """Kill a node's raylet with SIGKILL."""
        node = next(node for node in self.nodes if raylet_of(node) == raylet)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def working(self) -> dict[int, int]:
        """The processes of this cluster that do a task now, with the raylet that started each."""
        raylets = {raylet_of(node) for node in self.nodes}
        workers: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, IndexError):
                    if (entry / "cmdline").read_bytes().startswith(b"ray::on_node"):
                        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                        workers |= {int(entry.name): parent} if parent in raylets else {}
        return workers

    def close(self) -> None:
        self.cluster.shutdown()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)
