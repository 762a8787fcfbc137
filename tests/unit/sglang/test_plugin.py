"""What the entry point does before SGLang has read its arguments."""

import sys

import pytest
from pdpool_sglang import plugin


class TestSelection:
    @pytest.mark.parametrize(
        "arguments",
        [["--disaggregation-transfer-backend", "pdpool"], ["x", "--disaggregation-transfer-backend=pdpool", "y"]],
    )
    def test_our_name_selects(self, arguments):
        assert plugin.is_selected(arguments)

    @pytest.mark.parametrize("arguments", [[], ["--disaggregation-transfer-backend", "nixl"], ["pdpool"]])
    def test_other_arguments_do_not(self, arguments):
        assert not plugin.is_selected(arguments)


class TestFailure:
    def fail(self, monkeypatch, arguments):
        def broken():
            raise RuntimeError("SGLang has changed")

        ended = []
        monkeypatch.setattr(plugin, "_register", broken)
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(plugin.os, "_exit", ended.append)
        with pytest.raises(RuntimeError, match="has changed"):
            plugin.register()
        return ended

    def test_selected_backend_ends_the_process(self, monkeypatch, capsys):
        assert self.fail(monkeypatch, ["--disaggregation-transfer-backend", "pdpool"]) == [1]
        assert "SGLang has changed" in capsys.readouterr().err

    def test_other_backend_goes_on(self, monkeypatch):
        assert self.fail(monkeypatch, ["--disaggregation-transfer-backend", "nixl"]) == []
