-- Sliding window log with a precision: the admissions of one grain are one member, which counts until the last of them is one window
-- old. x is the window, and y the grain.

local precise_read, precise_wait = read_weights, log_wait

local function precise_add(charge, weight, _, total, first, header)
  return merge(charge, weight, now - now % charge.y, false, total, first, header)
end

-- What only the driver needs.

local function precise_give_back(charge, at, cost, _, _, header, budget)
  -- An admission that is older than the window may count in a member that is not: only its own is taken then.
  local from = math.max(at, now - charge.x + 1)
  take_back(charge.key, at, from, at - at % charge.y + charge.y - 1, cost, header, budget)
end
