"""The engine: which tokens run in the next step and in which blocks; all on plain ints.

core, control      one engine without its process: steps, and commands in between
pipeline           steps on the executor's thread, the next one submitted early
scheduling/        the scheduler: admission, preemption, results
features/          what attaches to the scheduler: adapters, remote KV, drafts
sequences/         requests in the engine, their KV, and the step that is being planned
cache/             KV blocks, the prefix cache and the tiers below it
drafters/          drafts guessed from tokens alone
lengths/           how many drafts to verify
policies           the scheduler's choices as functions of values
process/           the engine's process and its client
messages           everything that the two send to each other
"""
