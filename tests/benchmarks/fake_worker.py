"""A stack that only speaks the protocol: it answers with the seconds and tokens that its settings give, and fails where they say so."""

import json
import os
import sys

settings = json.loads(sys.argv[1])
if settings.get("fail_start"):
    sys.exit("no such instruction")
print(json.dumps({"load_seconds": 0.5, "vocab_size": 7, "versions": {"fake": "1"}, "peak_bytes": 1 << 20, **settings["hello"]}), flush=True)
seconds = list(settings["seconds"])
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "ceilings":
        reply = settings["ceilings"]
    elif request["op"] == settings.get("die_at"):
        os._exit(3)
    elif request["op"] == settings.get("fail_at"):
        reply = {"error": "ValueError: too long"}
    else:
        steps = request.get("steps", 1)
        reply = {"seconds": seconds.pop(0), "tokens": (settings["tokens"] * steps)[:steps], "peak_bytes": 2 << 20}
    print(json.dumps(reply), flush=True)
