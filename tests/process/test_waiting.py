"""Signals and output that may end before the process does."""

import io
import signal
import sys
from pathlib import Path

from meshpar.process.waiting import Lenient, put_back


def test_a_stream_that_cannot_be_written_any_more_loses_its_text_alone(tmp_path: Path) -> None:
    closed = io.StringIO()
    closed.close()
    narrow = (tmp_path / "narrow").open("w", encoding="ascii")

    class Entered(io.StringIO):
        """A stream that a signal's handler enters while it writes."""

        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call")

    for stream in (closed, narrow, Entered()):
        lenient = Lenient(stream)
        assert lenient.write("step 3: ∞\n") == 10
        lenient.flush()
    narrow.close()
    print("training continues", file=Lenient(closed))  # type: ignore[call-overload]
    assert sys.stdout is not closed


def test_a_handler_that_python_does_not_know_is_put_back_as_the_default() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        put_back({signal.SIGUSR1: None})
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        put_back({signal.SIGUSR1: before})
