"""runtime.terminal.progress_bar: what shows on a terminal, and that nothing shows elsewhere."""

import io

import pytest

from runtime.terminal import Muted, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def moved_to_the_half() -> None:
    with progress_bar("Predicting", "tokens") as advance:
        advance(0, 200)
        advance(100, 200)


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress_bar("Predicting", "tokens") as advance:
        advance(0, 200)
        assert "Predicting:   0%" in terminal.getvalue() and " 0/200 [00:00<?" in terminal.getvalue()
        monkeypatch.setattr("tqdm.tqdm.update", lambda bar, change: (setattr(bar, "n", bar.n + change), bar.refresh()))
        advance(100, 200)
    assert "Predicting:  50%" in terminal.getvalue() and " 100/200 [" in terminal.getvalue()


@pytest.mark.parametrize(("err", "out"), [(io.StringIO, io.StringIO), (Terminal, Muted)])
def test_what_is_no_terminal_or_of_a_process_that_does_not_speak_stays_empty(monkeypatch, err, out):
    monkeypatch.setattr("sys.stderr", stderr := err())
    monkeypatch.setattr("sys.stdout", out())
    moved_to_the_half()
    assert stderr.getvalue() == ""
