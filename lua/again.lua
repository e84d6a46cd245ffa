-- Decides again what the rules could not that were made so far, because a log is not plain or a command has failed.

if sliding_log then
  weighted_log = make_weighted_log()
  if coarse_log then
    weighted_log = make_coarse_log(weighted_log)
  end
end

if single then
  local fine, admitted, remaining, wait, reset
  fine, admitted, remaining, wait, reset =
    pcall(sliding_log and weighted_log or rule, KEYS[1], times, nil, cost, quota, x, y, z)
  if fine then
    return pack('<ddddd', now, admitted, remaining, wait, reset)
  end
  reply, errors = { pack('<ddddd', now, -1, 0, 0, 0) }, { admitted }
else
  decide_runs(true)
end

local packed = table.concat(reply, '', 1, passed + 1)
if not errors then
  return packed
end
for i, failure in ipairs(errors) do
  -- From its code on, which may follow the line of the script.
  local message = tostring(failure)
  errors[i] = string.match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
end
return { packed, unpack(errors) }
