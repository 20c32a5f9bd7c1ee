"""Ports and interfaces of HCCL, gloo and TensorPipe: written as they must be, there, free, and reachable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from recipes.doctor.lines import Line, Section
from recipes.doctor.node import Node

SECTION = Section("network")

# HCCL_IF_BASE_PORT of CANN: default and range; it takes 32 ports from there on since 8.5, 16 before.
BASE_PORT, BASE_RANGE, BASE_PORTS = 60000, range(1024, 65521), 32
HOST, DEVICE, BASE = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_IF_BASE_PORT"

# A rank and a rollout process share a device, so each needs a port of its own.
PROCESSES_A_DEVICE = 2

INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
HCCL_SOURCE = "CANN: environment variables of HCCL"


def look(node: Node) -> Iterator[Line]:
    """Yield what is to be said of ports and interfaces."""
    if node.without_npu:
        yield SECTION.unseen("HCCL ports", "the recipe is for a machine without an accelerator")
    else:
        yield from _ports(node)
    yield from _interfaces(node)


# ------------------------------------------------------------------------------------------------------------ ports


def ports(text: str) -> tuple[int, ...] | None:
    """Read `60000,60050-60100` as its ports; None is `auto`.

    Raises ValueError saying what CANN would not take: no number, outside 1 to 65535, backwards, or twice.
    """
    if text.strip() == "auto":
        return None
    found: list[int] = []
    for word in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", word)
        if not ends:
            raise ValueError(f"{word.strip()!r} is neither a port, a range such as 60000-60050, nor auto")
        low = int(ends[1])
        high = int(ends[2] or low)
        if not 1 <= low <= high <= 65535:
            raise ValueError(f"{word.strip()} is no range within 1 to 65535")
        found.extend(range(low, high + 1))
    twice = next((port for place, port in enumerate(sorted(found)[1:]) if sorted(found)[place] == port), None)
    if twice is not None:
        raise ValueError(f"port {twice} is named twice")
    return tuple(found)


def _ports(node: Node) -> Iterator[Line]:
    wanted = PROCESSES_A_DEVICE if node.subject else 1
    host: tuple[int, ...] | None = ()
    for variable in (HOST, DEVICE):
        text = node.environment.get(variable)
        if text is None:
            yield from _unset(node, variable)
            continue
        try:
            found = ports(text)
        except ValueError as fault:
            yield SECTION.fault(
                variable, {variable: text}, f"{fault}.", "Correct it.", noticed="first collective", source=HCCL_SOURCE
            )
            continue
        host = found if variable == HOST else host
        yield from _enough(variable, text, found, wanted)
    base = node.environment.get(BASE)
    if base is not None and not (base.isdigit() and int(base) in BASE_RANGE):
        yield SECTION.fault(
            BASE,
            {BASE: base},
            f"it must be a port from {BASE_RANGE[0]} to {BASE_RANGE[-1]}.",
            "Correct or unset it.",
            noticed="first collective",
            source=HCCL_SOURCE,
        )
    elif host == ():
        start = int(base) if base else BASE_PORT
        host = tuple(range(start, start + BASE_PORTS))
    if host:
        yield from taken(host, _listening(), wanted)
        dynamic = node.read("proc/sys/net/ipv4/ip_local_port_range")
        yield from ephemeral(host, dynamic, (node.read("proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip())
    if node.environment.get(DEVICE):
        yield SECTION.unseen("device ports in use", "those ports are on the devices' own network, not on this host")


def _unset(node: Node, variable: str) -> Iterator[Line]:
    if node.subject is None:
        yield SECTION.unseen(variable, "it is unset, and no recipe says whether processes share a device")
        return
    apart = node.subject.recipe.mode == "fully_async"
    if apart:
        yield SECTION.ok(variable, "unset; training and generation do not share devices")
        return
    yield SECTION.fault(
        variable,
        {variable: "unset"},
        "training and rollout share each device, and without a range of ports their processes want the same one.",
        "Set auto, or a range such as " + ("60000-60050." if variable == HOST else "61000-61050."),
        severity="warning",
        noticed="first collective: EI0020, EJ0003 or EI0019",
        source=HCCL_SOURCE,
    )


def _enough(variable: str, text: str, found: tuple[int, ...] | None, wanted: int) -> Iterator[Line]:
    if found is None:
        yield SECTION.ok(variable, "auto: the system chooses ports")
        return
    low = [port for port in found if port < 1024]
    if low or len(found) < wanted:
        why = (
            f"ports below 1024 are the system's ({low[0]})"
            if low
            else f"{len(found)} ports are fewer than the {wanted} processes of a device"
        )
        yield SECTION.fault(
            variable,
            {variable: text},
            f"{why}.",
            "Choose a range above 1024 with a port for each process.",
            noticed="first collective",
            source=HCCL_SOURCE,
        )
    else:
        yield SECTION.ok(variable, f"{text}: {len(found)} ports")


def taken(wanted: tuple[int, ...], listening: Iterable[int] | None, needed: int) -> Iterator[Line]:
    """Judge whether enough of HCCL's host ports are free. `listening`: ports in use here, None when not known."""
    span = f"{wanted[0]}-{wanted[-1]}"
    if listening is None:
        yield SECTION.unseen("host ports in use", "the system does not tell which are")
        return
    busy = sorted(set(wanted) & set(listening))
    if not busy:
        yield SECTION.ok("host ports in use", f"none of {span}")
        return
    too_few = len(wanted) - len(busy) < needed
    yield SECTION.fault(
        "host ports in use",
        {"ports": span},
        f"{len(busy)} of them are taken on this host, the first is {busy[0]}.",
        f"End what listens there, or choose another range ({HOST}, {BASE}).",
        severity="error" if too_few else "warning",
        noticed="first collective: a port is bound already",
        source=HCCL_SOURCE,
    )


def ephemeral(wanted: tuple[int, ...], dynamic: str | None, reserved: str) -> Iterator[Line]:
    """Judge whether the kernel may give HCCL's ports to others.

    `dynamic` is the text of its ip_local_port_range (None: not readable), `reserved` that of ip_local_reserved_ports.
    """
    ends = (dynamic or "").split()
    if len(ends) != 2 or not all(end.isdigit() for end in ends):
        yield SECTION.unseen("reserved ports", "the kernel does not tell which ports it gives out")
        return
    try:
        kept = set(ports(reserved) or ())
    except ValueError:
        kept = set()
    loose = [port for port in wanted if int(ends[0]) <= port <= int(ends[1]) and port not in kept]
    if not loose:
        yield SECTION.ok("reserved ports", f"the kernel gives none of {wanted[0]}-{wanted[-1]} to others")
        return
    yield SECTION.fault(
        "reserved ports",
        {"net.ipv4.ip_local_reserved_ports": reserved or "empty"},
        f"the kernel may give {len(loose)} of HCCL's host ports ({loose[0]} to {loose[-1]}) to any connection.",
        f"sysctl -w net.ipv4.ip_local_reserved_ports={wanted[0]}-{wanted[-1]}, on the host.",
        severity="warning",
        noticed="now and then: a port is bound already",
        source=HCCL_SOURCE,
    )


def _listening() -> set[int] | None:
    import psutil

    try:
        return {c.laddr.port for c in psutil.net_connections("inet") if c.laddr and c.status in ("LISTEN", "NONE")}
    except (psutil.Error, OSError):
        return None


# ------------------------------------------------------------------------------------------------------- interfaces


def chosen(text: str, present: Iterable[str]) -> list[str]:
    """Return the interfaces HCCL_SOCKET_IFNAME admits: `eth,enp` by prefix, `=eth0` by name, `^` all but those."""
    inverse, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    words = [word.strip() for word in text.split(",") if word.strip()]
    matches = (lambda name: name in words) if exact else (lambda name: name.startswith(tuple(words)))
    return [name for name in sorted(present) if matches(name) != inverse]


def _interfaces(node: Node) -> Iterator[Line]:
    import psutil

    try:
        present = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    except OSError as fault:
        yield SECTION.unseen("interfaces", f"the system does not tell them ({fault.strerror})")
        return
    in_recipe = node.subject.recipe.env if node.subject else {}
    for variable in INTERFACES:
        yield from interface(
            variable,
            node.environment.get(variable),
            present,
            several=node.several,
            job_wide=variable in in_recipe,
            matters=not (node.without_npu and variable.startswith("HCCL")),
        )


def interface(
    variable: str,
    text: str | None,
    present: Mapping[str, bool],
    *,
    several: bool,
    job_wide: bool = False,
    matters: bool = True,
) -> Iterator[Line]:
    """Judge one *_SOCKET_IFNAME against the interfaces of the node (name: whether it is up).

    `several`: the run spans nodes; `job_wide`: the recipe sets the variable, for all nodes alike.
    """
    source = HCCL_SOURCE if variable.startswith("HCCL") else "torch.distributed"
    first, noticed = "HCCL" if variable.startswith("HCCL") else "torch", "first collective"
    keys = {variable: text}
    if text is None or not text.strip():
        yield from _unnamed(variable, several=several, matters=matters, source=source)
        return
    if variable.startswith("HCCL"):
        named = chosen(text, present)
    else:
        named = [name.strip() for name in text.split(",") if name.strip() in present]
    missing = [n.strip() for n in text.split(",") if n.strip() not in present] if first == "torch" else []
    here = ", ".join(sorted(present)) or "none"
    if not named or missing:
        yield SECTION.fault(
            variable,
            keys,
            f"this node has no such interface; it has {here}.",
            "Name the one the nodes reach each other by, on each node its own.",
            noticed=noticed,
            source=source,
        )
        return
    if several and all(_loopback(name) for name in named):
        yield SECTION.fault(
            variable,
            keys,
            "that is the loopback interface, by which no other node is reached.",
            "Name the one the nodes reach each other by.",
            noticed=f"{noticed}: it waits until the timeout",
            source=source,
        )
        return
    if not any(present[name] for name in named):
        yield SECTION.fault(variable, keys, "that interface is down.", "Bring it up.", noticed=noticed, source=source)
        return
    yield SECTION.ok(variable, f"{text}: {', '.join(named)}")
    if several and job_wide:
        yield SECTION.fault(
            variable,
            {f"env.{variable}": text},
            "the recipe sets it for all nodes, and names of interfaces differ between nodes.",
            "Take it out of the recipe and export it on each node before `ray start`.",
            severity="warning",
            noticed=noticed,
            source=source,
        )


def _unnamed(variable: str, *, several: bool, matters: bool, source: str) -> Iterator[Line]:
    if not several or not matters or variable.startswith("TP"):
        yield SECTION.ok(variable, "unset; a run on one node needs none" if not several else "unset; not needed")
        return
    yield SECTION.fault(
        variable,
        {variable: "unset"},
        "the first interface found is taken, which need not reach the other nodes.",
        "Export it on each node with that node's own interface, before `ray start`.",
        severity="warning",
        noticed="first collective: it waits until the timeout",
        source=source,
    )


def _loopback(name: str) -> bool:
    return name == "lo" or name.startswith("lo:")
