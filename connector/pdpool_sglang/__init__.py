"""pdpool's connector as a transfer backend of SGLang: `--disaggregation-transfer-backend pdpool`.

`plugin` is found by SGLang and registers the name. `manager`, `sender` and `receiver` are the classes that SGLang's
scheduler calls; they have no protocol, timers or retries. `memory` describes SGLang's cache to the connector,
`settings` its ranks. `hooks` and `holds` give pages back only when they are releasable. `surface` is the only module
that touches what is private in SGLang.
"""
