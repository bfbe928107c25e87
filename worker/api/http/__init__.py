"""HTTP: connections, exchanges, arrivals, and the limits of bodies. Nothing here knows a route or a
model.

`connection` is the protocol under uvicorn, `exchange` one request and its reply, `arrival` what its
headers say, `limits` and `field_errors` check bodies and name the fields at fault, `off_loop` moves
long work to a thread.
"""
