"""A pod template whose engine has a fault while a file exists. Its health check succeeds.

With `FLAG`, it fails every POST. With `HANGS`, its reports on its queues never answer.
"""

from tests.cluster.stack import Object

FLAG = "/tmp/failing"
HANGS = "/tmp/hanging"
FAULT = f'''
import asyncio
import os
from aiohttp import web

@web.middleware
async def fault(request, handler):
    if request.method == "POST" and os.path.exists("{FLAG}"):
        return web.Response(status=500, text="broken by the test")
    if request.path in ("/v1/loads", "/metrics") and os.path.exists("{HANGS}"):
        await asyncio.Event().wait()
    return await handler(request)

whole = web.Application.__init__

def init(self, *args, middlewares=(), **kwargs):
    whole(self, *args, middlewares=[*middlewares, fault], **kwargs)

web.Application.__init__ = init
'''
"""Python runs `sitecustomize` at its start, so the engine itself stays as it is."""

CONFIG: Object = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "fault"},
    "data": {"sitecustomize.py": FAULT},
}
TEMPLATE: Object = {
    "spec": {
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "PYTHONPATH", "value": "/fault:/app"}],
                "volumeMounts": [{"name": "fault", "mountPath": "/fault", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "fault", "configMap": {"name": "fault"}}],
    }
}
