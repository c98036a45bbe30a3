-- ARGV: request id. Drops its reservations on all workers of the shard.
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  redis.call('HDEL', reservations_key(id), ARGV[1])
end
return redis.status_reply('OK')
