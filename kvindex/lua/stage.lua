-- ARGV: staging key, expiry_ms, then pairs: tiers, packed hashes. Adds a piece of a snapshot that nobody reads yet.
local key, HASH_BYTES, CHUNK = ARGV[1], 16, 500
for i = 3, #ARGV, 2 do
  local tiers, packed, writes = ARGV[i], ARGV[i + 1], {}
  for at = 1, #packed, HASH_BYTES do
    writes[#writes + 1] = string.sub(packed, at, at + HASH_BYTES - 1)
    writes[#writes + 1] = tiers
    if #writes == 2 * CHUNK then
      call('HSET', key, unpack(writes))
      writes = {}
    end
  end
  if #writes > 0 then call('HSET', key, unpack(writes)) end
end
call('PEXPIRE', key, ARGV[2])
return redis.status_reply('OK')
