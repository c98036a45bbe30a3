-- ARGV: pairs of root seed and packed chain. Returns for each live worker its report, device length, local length, and
-- whether a chain was given for its root; all in one msgpack string, which a reader takes apart much faster than it
-- would a nested reply.
local HASH_BYTES, DEVICE, LOCAL = 16, 1, 7

-- A chain as the searches read it: its hashes are cut out when first looked at, and shared by all workers.
local function opened(packed)
  local chain = {length = #packed / HASH_BYTES}
  local function cut(_, position) -- position counts from 1
    local hash = string.sub(packed, (position - 1) * HASH_BYTES + 1, position * HASH_BYTES)
    chain[position] = hash
    return hash
  end
  return setmetatable(chain, {__index = cut})
end

-- How many hashes from the head are held in one of `tiers`, looking at [1, limit]. `held` remembers what was read.
-- Sets are prefix-closed, so the held positions are [1, length] and a binary search finds the length: head first,
-- because most workers hold nothing, then the end, because those that do mostly hold all. (Looking at several places
-- a call was measured to be slower: what costs is the interpreter, not the call.)
local function held_length(key, chain, limit, tiers, held)
  local function is_held(position)
    local bits = held[position]
    if not bits then
      bits = tonumber(call('HGET', key, chain[position]) or 0)
      held[position] = bits
    end
    return band(bits, tiers) ~= 0
  end
  if limit == 0 or not is_held(1) then return 0 end
  if is_held(limit) then return limit end
  local low, high = 1, limit -- low is held, high is not
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if is_held(middle) then low = middle else high = middle end
  end
  return low
end

-- Speculative entries of this moment, by the worker#epoch that they expect to hold them.
local speculative = {}
for _, name in ipairs(call('ZRANGEBYSCORE', P .. 'speculative', '(' .. number(now_ms), '+inf')) do
  local owner = string.sub(name, HASH_BYTES + 1)
  speculative[owner] = speculative[owner] or {}
  table.insert(speculative[owner], name)
end

-- The longest common prefix with a speculative chain, if longer than `length`. Hashes are chained: equal at one place
-- means equal before it, so one look at the next place settles most entries.
local function expected_length(owner, chain, num_blocks, length)
  for _, name in ipairs(speculative[owner] or {}) do
    local key = P .. 'speculative:' .. name
    local function agrees(position)
      local from = (position - 1) * HASH_BYTES
      return call('GETRANGE', key, from, from + HASH_BYTES - 1) == chain[position]
    end
    if length < num_blocks and agrees(length + 1) then
      local low, high = length + 1, num_blocks + 1 -- low agrees, high does not
      while high - low > 1 do
        local middle = math.floor((low + high) / 2)
        if agrees(middle) then low = middle else high = middle end
      end
      length = low
    end
  end
  return length
end

local chains = {}
for i = 1, #ARGV, 2 do chains[ARGV[i]] = opened(ARGV[i + 1]) end

local answer = {}
for _, id in ipairs(live_workers()) do
  local head = call('HMGET', worker_key(id), 'epoch', 'load', 'load_at', 'seq', 'seq_at', 'root')
  local row = report(id, head)
  if row then
    local epoch, chain = head[1], chains[head[6]]
    local num_local, num_device = 0, 0
    if chain then
      local key, held, num_blocks = index_key(id, epoch), {}, chain.length
      num_local = held_length(key, chain, num_blocks, LOCAL, held)
      num_device = held_length(key, chain, num_local, DEVICE, held)
      local owner = id .. '#' .. epoch
      num_local = expected_length(owner, chain, num_blocks, num_local)
      num_device = expected_length(owner, chain, num_blocks, num_device)
    end
    row[#row + 1] = num_device
    row[#row + 1] = num_local
    row[#row + 1] = chain and 1 or 0
    answer[#answer + 1] = row
  end
end
return cmsgpack.pack(answer)
