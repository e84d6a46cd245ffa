-- Sliding window log with a precision: the admissions of one grain are one member, which counts until the last of them is one window
-- old. x is the window, and y the grain. It has the members of `log.lua`, and no others.

local precise = { wait = log.wait, reset = log.reset }

function precise.read(charge, needed)
  charge.first, charge.newest, charge.budget = 1, nil, BUDGET
  charge.til = charge.til or digits(now - charge.x)
  read_weights(charge)
  return room_of(charge, needed)
end

function precise.add(charge, weight)
  merge(charge, weight, now - now % charge.y, false)
end

-- What only the driver needs.

function precise.give_back(charge, at, cost)
  local expired = now - charge.x
  -- An admission that is older than the window may count in a member that is not: only its own is taken then.
  take_back(charge, at, max(at, expired + 1), at - at % charge.y + charge.y - 1, cost)
end
