-- ARGV: id, epoch, record, root seed, lease_ms. Returns fresh, kept or superseded.
local id, epoch, record, root, lease_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local HISTORY = 16         -- epochs remembered a name: older ones count as never seen
local FORGET_MS = 86400000 -- a name unused for a day is forgotten

local epochs = {}
local remembered = call('HGET', P .. 'epochs', id)
if remembered then
  for word in string.gmatch(remembered, '%d+') do epochs[#epochs + 1] = word end
  table.remove(epochs, 1)
end
for place, known in ipairs(epochs) do
  if known == epoch and place < #epochs then return 'superseded' end
end

local function forget_old_names()
  local all = call('HGETALL', P .. 'epochs')
  for i = 1, #all, 2 do
    local forget_at = tonumber(string.match(all[i + 1], '^%d+'))
    if forget_at < now_ms and call('EXISTS', worker_key(all[i])) == 0 then
      call('HDEL', P .. 'epochs', all[i])
    end
  end
end

local holder = call('HGET', worker_key(id), 'epoch')
local answer = 'kept'
if holder ~= epoch then
  answer = 'fresh'
  if holder then call('UNLINK', index_key(id, holder)) end
  call('UNLINK', worker_key(id), reservations_key(id), index_key(id, epoch))
  forget_old_names()
end
if epochs[#epochs] ~= epoch then
  epochs[#epochs + 1] = epoch
  if #epochs > HISTORY then table.remove(epochs, 1) end
end
call('HSET', P .. 'epochs', id, number(now_ms + FORGET_MS) .. ' ' .. table.concat(epochs, ' '))
call('PEXPIRE', P .. 'epochs', FORGET_MS)
call('HSET', worker_key(id), 'epoch', epoch, 'record', record, 'root', root)
call('PEXPIRE', worker_key(id), lease_ms)
call('PEXPIRE', index_key(id, epoch), lease_ms)
enlist(id, lease_ms)
return answer
