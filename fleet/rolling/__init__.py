"""Restarts of a fleet's parts that cost no request.

Theory of operation. A new process serves, and those who send requests have found it healthy,
before an old one is left out; an old one is left out by all who send requests, and has finished
what it has, before it is ended.

- Picker: a new one starts beside the old one, on ports of its own. Envoy is told of both, then,
  once it finds the new one healthy, of the new one alone. The old one drains and ends.
- Worker, one after the other: first the picker no longer picks it; then it is empty, or the time
  for that is over; then Envoy no longer knows it, so that a request that nobody picked does not
  find it either. It ends, starts again at its port, and comes back: first to Envoy, which has to
  find it healthy, then to the picker, which has to have read its metrics. The only worker of a
  fleet cannot be spared: there a new one comes first, on a port of its own.
- Envoy: the next one takes the listening socket over from the old one (Envoy's hot restart), so
  that no connection is lost on its way in. The old one ends its connections with their next
  answer, and itself when none is left or the time for that is over.
"""
