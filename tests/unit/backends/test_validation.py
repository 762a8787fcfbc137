"""What a descriptor may say, whichever backend reads it."""

import msgspec
import pytest
from pdpool_connector.backends.validation import Session


@pytest.mark.parametrize("session", ["host:80", "[fd00::1]:16000", "h:0"])
def test_a_session_is_a_host_and_a_port(session: str) -> None:
    assert msgspec.convert(session, Session) == session


@pytest.mark.parametrize("session", ["host:80\n", "host:80 ", "ho st:80", "host:800000", "host:", ":80", "host", ""])
def test_what_is_no_host_and_port_is_no_session(session: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(session, Session)
