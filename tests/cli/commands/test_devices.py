"""``--devices``: what becomes of the processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixkit.cli.commands.devices import DeviceRefused, run_on_devices
from prefixkit.cli.terminal import terminal

ROOT = Path(__file__).parents[3]


def test_what_one_device_refuses_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DeviceRefused, match="the process on cpu ended with status 2"):
        run_on_devices(["cpu"], ["--frobnicate"], terminal(stderr=True))
    assert "[cpu] error: No such option: --frobnicate" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such signal")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "prefixkit.py").write_text("import time; print('began', flush=True); time.sleep(20); print('survived')")
    start = (
        "import sys; from prefixkit.cli.commands import devices; from prefixkit.cli.terminal import terminal; "
        f"import os; os.chdir({str(tmp_path)!r}); devices.run_on_devices(['cpu'], [], terminal())"
    )
    command = [sys.executable, "-c", start]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "began\n"
        parent.kill()
        assert parent.stdout.read() == "", "its end is that of the last process that writes there"
