-- ARGV: request id. Drops its reservations on all workers of the shard.
for _, id in ipairs(call('ZRANGE', KEYS[1], 0, -1)) do
  call('HDEL', reservations_key(id), ARGV[1])
end
return redis.status_reply('OK')
