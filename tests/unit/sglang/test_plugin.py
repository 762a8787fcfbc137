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
    def fail(self, monkeypatch, arguments, error=None):
        def broken():
            raise error or RuntimeError("SGLang has changed")

        ended = []
        monkeypatch.setattr(plugin, "_register", broken)
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(plugin.os, "_exit", ended.append)
        with pytest.raises(type(error or RuntimeError())):
            plugin.register()
        return ended

    def test_selected_backend_ends_the_process(self, monkeypatch, capsys):
        assert self.fail(monkeypatch, ["--disaggregation-transfer-backend", "pdpool"]) == [1]
        assert capsys.readouterr().err.endswith(": SGLang has changed\n")

    def test_missing_package_is_named_with_the_remedy(self, monkeypatch, capsys):
        error = ModuleNotFoundError("No module named 'zmq'", name="zmq")
        self.fail(monkeypatch, ["--disaggregation-transfer-backend=pdpool"], error)
        assert capsys.readouterr().err.endswith(
            "'zmq': run pip install 'WHEEL[sglang]' in SGLang's environment, with the file of pdpool's wheel\n"
        )

    def test_bad_variable_is_named_before_the_model_is_loaded(self, monkeypatch, capsys):
        ended = []
        monkeypatch.setattr(sys, "argv", ["--disaggregation-transfer-backend=pdpool"])
        monkeypatch.setattr(plugin.os, "_exit", ended.append)
        monkeypatch.setenv("PDPOOL_ADMIN_PORT", "x")
        with pytest.raises(ValueError, match="PDPOOL_ADMIN_PORT"):
            plugin.register()
        assert ended == [1]
        assert capsys.readouterr().err.endswith(
            ": PDPOOL_ADMIN_PORT='x': give a TCP port, 0 (any free port) to 65535\n"
        )

    def test_other_backend_goes_on(self, monkeypatch):
        assert self.fail(monkeypatch, ["--disaggregation-transfer-backend", "nixl"]) == []
