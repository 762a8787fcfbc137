"""pdpool's connector as a KV connector of vLLM: `kv_connector` "PdpoolConnector".

vLLM makes the class of `connector` once in its scheduler and once in each worker. `scheduler` decides there what each
step does with hand-offs, and `worker` does it with the connector. `memory` describes vLLM's cache to the connector,
`settings` its ranks. `connector` is the only module that imports vLLM.
"""
