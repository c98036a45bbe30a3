-- ARGV: id, epoch. Death of a worker: its index is one key.
local id, epoch = ARGV[1], ARGV[2]
if call('HGET', worker_key(id), 'epoch') ~= epoch then return 0 end
call('UNLINK', worker_key(id), index_key(id, epoch), reservations_key(id))
call('ZREM', KEYS[1], id)
return 1
