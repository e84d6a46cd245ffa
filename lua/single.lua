-- One check of one charge, as most calls are.

local rule = sliding_log or sliding_counter or fixed_window or token_bucket or concurrency

if single and not weighted_log then
  local fine, admitted, remaining, wait, reset = pcall(rule, KEYS[1], times, nil, cost, quota, x, y, z)
  if fine then
    return pack('<ddddd', now, admitted, remaining, wait, reset)
  end
end
