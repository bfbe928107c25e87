"""KV that moves between engines or to a disk. Nothing here schedules or knows tensors.

tcp                   the connector that the engine calls, and its thread
serving, fetching     the two sides of that thread: KV for other engines, KV from them
transfers, exports    the state that both threads share; exported KV
asked                 questions to another engine's caches
wire, channel         frames and encryption; one end of a connection
shared, nixl          memory of one machine, RDMA
access, content       who may fetch, and the identity of KV
disk                  files of blocks
pull                  the handle of a transfer
"""
