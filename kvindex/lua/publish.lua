-- ARGV: id, epoch, first event number, count, cleared tiers, then triples: tiers set, tiers dropped, packed hashes.
-- The triples are the net effect of all events of the batch, after the clear. Applying a batch again over a state
-- that holds a part of it gives the same state, because the last word on each (hash, tier) wins.
-- Returns applied, gap, stale_epoch or unknown_worker.
local id, epoch, first, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local cleared = tonumber(ARGV[5])
local HASH_BYTES, CHUNK, ALL_TIERS = 16, 500, 7

local head = call('HMGET', worker_key(id), 'epoch', 'seq', 'tiers')
if not head[1] then return 'unknown_worker' end
if head[1] ~= epoch then return 'stale_epoch' end
local seq = tonumber(head[2] or '0')
if first > seq + 1 then return 'gap' end

local key = index_key(id, epoch)
local tiers = tonumber(head[3] or '0')

local function clear_all()
  call('UNLINK', key)
  tiers = 0
end

local function clear_some()
  -- The rare case of a tier cleared while others keep their blocks: a walk over the whole hash.
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    local held = tonumber(all[i + 1])
    local kept = band(held, bnot(cleared))
    if kept == 0 then
      call('HDEL', key, all[i])
    elseif kept ~= held then
      call('HSET', key, all[i], kept)
    end
  end
  tiers = band(tiers, bnot(cleared))
end

local function apply(set, dropped, fields)
  local held = call('HMGET', key, unpack(fields))
  local writes, deletes = {}, {}
  for i, field in ipairs(fields) do
    local before = tonumber(held[i] or '0')
    local after = bor(band(before, bnot(dropped)), set)
    if after == 0 then
      if before ~= 0 then deletes[#deletes + 1] = field end
    elseif after ~= before then
      writes[#writes + 1] = field
      writes[#writes + 1] = after
    end
  end
  if #writes > 0 then call('HSET', key, unpack(writes)) end
  if #deletes > 0 then call('HDEL', key, unpack(deletes)) end
end

if first + count - 1 > seq then
  if cleared ~= 0 then
    if band(tiers, bnot(cleared)) == 0 then clear_all() else clear_some() end
  end
  for i = 6, #ARGV, 3 do
    local set, dropped, packed = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), ARGV[i + 2]
    local fields = {}
    for at = 1, #packed, HASH_BYTES do
      fields[#fields + 1] = string.sub(packed, at, at + HASH_BYTES - 1)
      if #fields == CHUNK then
        apply(set, dropped, fields)
        fields = {}
      end
    end
    if #fields > 0 then apply(set, dropped, fields) end
    tiers = bor(tiers, set)
  end
  call('PEXPIRE', key, math.max(1, call('PTTL', worker_key(id))))
  seq = first + count - 1
end
call('HSET', worker_key(id), 'seq', number(seq), 'seq_at', number(now_ms), 'tiers', tiers)
return 'applied'
