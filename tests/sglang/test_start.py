"""What a scheduler process checks when it starts with the plugin."""

import pytest


@pytest.fixture(scope="module")
def facts(run_script):
    (found,) = run_script("start.py")
    return found


def test_tested_version_is_as_we_know_it(facts):
    assert facts["checked"] == ""


def test_backend_has_our_classes(facts):
    assert facts["classes"] == ["KVArgs", "Manager", "Sender", "Receiver"]


def test_fake_transfers_stay_sglangs(facts):
    assert facts["fake"] == "FakeKVSender"


def test_changed_signature_is_named(facts):
    assert "release_kv_cache takes ('req', 'tree_cache', 'checkpoint'), must take" in facts["signature"]


def test_missing_hook_is_named(facts):
    assert "the hook around sglang.srt.mem_cache.common.release_kv_cache is not in place" in facts["hook"]


def test_other_version_needs_the_variable(facts):
    assert facts["version"] == ["", ""]
    refused, allowed = facts["other"]
    assert "SGLang 0.5.99 was not tested" in refused
    assert allowed == ""
