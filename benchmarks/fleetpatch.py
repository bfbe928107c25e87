import json, virtual_replicas as v
_dumps=json.dumps
class J:
    loads=staticmethod(json.loads)
    @staticmethod
    def dumps(o):
        if isinstance(o,dict) and 'prompt' in o: o['stream']=True
        return _dumps(o)
v.json=J
