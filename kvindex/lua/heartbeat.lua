-- ARGV: id, epoch, load record, lease_ms, named request ids ... Returns 1, or 0 when this epoch does not hold the name.
local id, epoch, load_record, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if call('HGET', worker_key(id), 'epoch') ~= epoch then return 0 end

call('HSET', worker_key(id), 'load', load_record, 'load_at', number(now_ms))
call('PEXPIRE', worker_key(id), lease_ms)
call('PEXPIRE', index_key(id, epoch), lease_ms)
enlist(id, lease_ms)

local reserved = call('HGETALL', reservations_key(id))
if #reserved > 0 then
  local named, done = {}, {}
  for i = 5, #ARGV do named[ARGV[i]] = true end
  for i = 1, #reserved, 2 do
    local ends_at = tonumber(string.match(reserved[i + 1], '^%d+'))
    if named[reserved[i]] or ends_at <= now_ms then done[#done + 1] = reserved[i] end
  end
  for i = 1, #done, 500 do
    call('HDEL', reservations_key(id), unpack(done, i, math.min(i + 499, #done)))
  end
end

call('ZREMRANGEBYSCORE', KEYS[1], '-inf', number(now_ms))
call('ZREMRANGEBYSCORE', P .. 'speculative', '-inf', number(now_ms))
return 1
