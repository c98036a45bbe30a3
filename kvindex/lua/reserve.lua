-- ARGV: quintuples of worker id, request id, expiry_ms, tokens, gateway epoch.
for i = 1, #ARGV, 5 do
  local id, expiry_ms = ARGV[i], tonumber(ARGV[i + 2])
  if call('EXISTS', worker_key(id)) == 1 then
    local key = reservations_key(id)
    local record = number(now_ms + expiry_ms) .. ' ' .. ARGV[i + 3] .. ' ' .. ARGV[i + 4]
    call('HSET', key, ARGV[i + 1], record)
    call('PEXPIRE', key, math.max(expiry_ms, call('PTTL', key)))
  end
end
return redis.status_reply('OK')
