-- Put in front of every script. Owns the names of keys and the server's clock.
--
-- KEYS[1] is the shard's registry of workers; all other keys of the shard share its hash tag, so one node holds them
-- and a script may name them by itself. `P` is their common prefix, `<word>:<schema version>:{<shard>}:`.
--
--   workers                 sorted set: worker id -> when its lease ends, milliseconds of the server's clock
--   epochs                  hash: worker id -> "<when to forget> <epoch> <epoch> ...", newest last
--   worker:<id>             hash: epoch, record, root, load, load_at, seq, seq_at, tiers; expires with the lease
--   index:<id>#<epoch>      hash: block hash (16 bytes) -> tiers it is held in, bits as a number; expires likewise
--   reservations:<id>       hash: request id -> "<when it ends> <tokens> <gateway epoch>"; expires with the last one
--   speculative             sorted set: last block hash .. <id>#<epoch> -> when it ends
--   speculative:<the same>  string: the whole chain; expires by itself
--   staging:<id>#<epoch>:*  hash like index, while a snapshot is being sent; expires by itself
--
-- Milliseconds and event numbers stay below 2^53; epochs do not, so they are compared as text.
local P = string.sub(KEYS[1], 1, -8)
local call, band, bor, bnot = redis.call, bit.band, bit.bor, bit.bnot
local clock = call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function worker_key(id) return P .. 'worker:' .. id end
local function index_key(id, epoch) return P .. 'index:' .. id .. '#' .. epoch end
local function reservations_key(id) return P .. 'reservations:' .. id end
local function number(n) return string.format('%.0f', n) end

-- Puts a worker on the registry until its lease ends; the registry itself goes with the last lease.
local function enlist(id, lease_ms)
  call('ZADD', KEYS[1], number(now_ms + lease_ms), id)
  call('PEXPIRE', KEYS[1], math.max(lease_ms, call('PTTL', KEYS[1])))
end
