-- ARGV: registries of other schema versions, to be counted. Returns that count, then for each worker its report and
-- its record.
local ignored = 0
for _, registry in ipairs(ARGV) do
  ignored = ignored + call('ZCOUNT', registry, '(' .. number(now_ms), '+inf')
end
local answer = {ignored}
for _, id in ipairs(live_workers()) do
  local head = call('HMGET', worker_key(id), 'epoch', 'load', 'load_at', 'seq', 'seq_at', 'record')
  local row = report(id, head)
  if row then
    row[#row + 1] = head[6]
    answer[#answer + 1] = row
  end
end
return answer
