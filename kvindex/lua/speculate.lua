-- ARGV: id, packed chain, ttl_ms. The last hash names the whole chain, so routing it again renews one entry.
local id, packed, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local epoch = call('HGET', worker_key(id), 'epoch')
if not epoch then return redis.status_reply('OK') end
local name = string.sub(packed, -16) .. id .. '#' .. epoch
call('SET', P .. 'speculative:' .. name, packed, 'PX', ttl_ms)
call('ZADD', P .. 'speculative', number(now_ms + ttl_ms), name)
call('PEXPIRE', P .. 'speculative', math.max(ttl_ms, call('PTTL', P .. 'speculative')))
return redis.status_reply('OK')
