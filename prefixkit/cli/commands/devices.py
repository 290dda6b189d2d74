"""``prefixkit sample --devices``: a process for each device, each with its part of the samples."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from rich.console import Console

from prefixkit.cli.errors import REFUSED, Interrupted, at_work
from prefixkit.cli.terminal import line


class DeviceError(OSError):
    """The process of a device has failed."""


class DeviceRefused(ValueError):
    """The process of a device has refused a request that cannot be met."""


def run_on_devices(devices: Sequence[str], arguments: Sequence[str], console: Console) -> None:
    """Run ``prefixkit`` once for each device, and pass on the lines that the processes write.

    Args:
        devices: As torch names them.
        arguments: The command line, without ``--devices``, ``--device`` and ``--shard``.
        console: Where lines go, each with the device before it.

    Raises:
        Interrupted: Ctrl-C or SIGTERM, which was passed on to all processes.
        DeviceError: one process failed; the others were stopped, and what they had finished is kept.
        DeviceRefused: one process refused a request that cannot be met; all processes get the same request.
    """
    started: list[subprocess.Popen[bytes]] = []
    readers = []
    try:
        for index, device in enumerate(devices):
            own = ["--devices", "", "--device", device, "--shard", f"{index}/{len(devices)}"]
            command = [sys.executable, "-m", "prefixkit", *arguments, *own]
            # A session of its own: Ctrl-C comes to this process alone, which hands it on once.
            process = subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            started.append(process)
            assert process.stderr is not None
            reader = threading.Thread(target=_pass_on, args=(process.stderr, device, console), daemon=True)
            reader.start()
            readers.append(reader)
        with at_work(DeviceError):
            _wait(started, devices)
    except KeyboardInterrupt:
        raise Interrupted("on all devices; the same command resumes the run") from None
    finally:
        _stop(started)
        for reader in readers:
            reader.join(timeout=5)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent is killed: otherwise it would block the resumed command."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(started: Sequence[subprocess.Popen[bytes]], devices: Sequence[str]) -> None:
    """Wait until all processes have ended, or one has failed."""
    left = dict(enumerate(started))
    while left:
        for index, process in list(left.items()):
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            del left[index]
            if code:
                kind = DeviceRefused if code == REFUSED else DeviceError
                raise kind(f"the process on {devices[index]} ended with status {code}; what it said is above")


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run, as Ctrl-C would, and wait."""
    for process in started:
        process.send_signal(signal.SIGINT)  # does nothing if the process has ended
    for process in started:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pass_on(stream: IO[bytes], device: str, console: Console) -> None:
    for said in stream:
        text = said.decode(errors="replace").rstrip()
        if text:
            console.print(line((f"[{device}] ", "dim"), text), soft_wrap=True)
