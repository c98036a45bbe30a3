-- Put between the prelude and the scripts that list workers. Owns what such a list says of one worker.

-- The report of a live worker as a flat list, or nil when it is no candidate:
-- id, epoch, load record, load age, reserved tokens, reservations, last event number or -1, index age or -1.
local function report(id, head)
  local epoch, load_record, load_at, seq, seq_at = head[1], head[2], head[3], head[4], head[5]
  if not epoch or not load_record then return nil end
  local tokens, count = 0, 0
  for _, reservation in ipairs(call('HVALS', reservations_key(id))) do
    local ends_at, num_tokens = string.match(reservation, '^(%d+) (%d+)')
    if tonumber(ends_at) > now_ms then
      tokens = tokens + tonumber(num_tokens)
      count = count + 1
    end
  end
  local seq_age = -1
  if seq then seq_age = now_ms - tonumber(seq_at) end
  return {id, epoch, load_record, now_ms - tonumber(load_at), tokens, count, tonumber(seq or '-1'), seq_age}
end

local function live_workers()
  return call('ZRANGEBYSCORE', KEYS[1], '(' .. number(now_ms), '+inf')
end
