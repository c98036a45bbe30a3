-- ARGV: id, epoch, sequence number, staging key, number of hashes staged, tiers among them.
-- Puts a staged snapshot in the place of the index in one act, unless the index already holds a later event.
-- Returns applied, gap, stale_epoch or unknown_worker.
local id, epoch, sequence_number = ARGV[1], ARGV[2], tonumber(ARGV[3])
local staging, num_hashes, tiers = ARGV[4], tonumber(ARGV[5]), ARGV[6]

local head = call('HMGET', worker_key(id), 'epoch', 'seq')
local answer = 'applied'
if not head[1] then
  answer = 'unknown_worker'
elseif head[1] ~= epoch then
  answer = 'stale_epoch'
elseif sequence_number < tonumber(head[2] or '0') or call('HLEN', staging) ~= num_hashes then
  answer = 'gap' -- late, or pieces of the snapshot were lost on the way
end
if answer ~= 'applied' then
  call('UNLINK', staging)
  return answer
end

local key = index_key(id, epoch)
call('UNLINK', key)
if num_hashes > 0 then
  call('RENAME', staging, key)
  call('PEXPIRE', key, math.max(1, call('PTTL', worker_key(id))))
end
call('HSET', worker_key(id), 'seq', number(sequence_number), 'seq_at', number(now_ms), 'tiers', tiers)
return 'applied'
