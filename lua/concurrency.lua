-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases that
-- have not expired leave room for it. x is the length of a lease, and y and z are its id, which the client chooses.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. While some weigh more than 1,
-- a member `#` at rank 0 has the score -(total weight - number of leases).

-- Counts members as ended.
local function end_all(charge, ended, members)
  for _, member in ipairs(members) do
    ended[#ended + 1] = member
    if charge.marked > 0 then
      local _, _, _, weight = unpack_numbers('<dddd', member)
      charge.total, charge.extra = charge.total - weight + 1, charge.extra - weight + 1
    end
  end
  charge.total = charge.total - #members
end

-- Whether a lease is of a clock that is gone. One that is ahead by less than its length may be alive: its next renewal is by the
-- clock that was set back.
local function is_gone(member, expires)
  return tonumber(expires) > now + 2 * unpack_numbers('<d', member, 17)
end

-- The leases that have ended: those that have expired, and if more than `most` is held then, those of a clock that is gone.
local function ended_of(charge, most, last)
  local ended = {}
  end_all(charge, ended, call('ZRANGEBYSCORE', charge.key, '(0', now, 'LIMIT', '0', BOUND))
  if charge.total <= most or charge.newest <= now or not is_gone(last, charge.newest) then
    return ended
  end
  -- The newest first.
  local gone = {}
  local members = call('ZREVRANGEBYSCORE', charge.key, '+inf', now, 'WITHSCORES', 'LIMIT', '0', BOUND)
  charge.newest = now
  for n = 1, #members, 2 do
    if not is_gone(members[n], members[n + 1]) then
      charge.newest = tonumber(members[n + 1])
      break
    end
    gone[#gone + 1] = members[n]
  end
  end_all(charge, ended, gone)
  return ended
end

-- Writes what the leases weigh beyond 1 each.
local function mark(charge)
  if charge.extra > 0 and charge.extra ~= charge.marked then
    call('ZADD', charge.key, -charge.extra, '#')
  elseif charge.marked > 0 and charge.extra <= 0 then
    call('ZREM', charge.key, '#')
  end
  charge.marked = charge.extra
end

-- Removes leases that have ended.
local function remove_ended(charge)
  if #charge.ended > 0 then
    call('ZREM', charge.key, unpack(charge.ended))
    charge.ended = {}
  end
  mark(charge)
end

local function concurrency_read(charge, needed)
  local key = charge.key
  local total = call('ZCARD', key)
  charge.weight = math.min(charge.cost, HEAVIEST)
  charge.total, charge.extra, charge.marked, charge.newest, charge.ended = total, 0, 0, now, {}
  if total > 0 then
    local first, first_at, second, second_at = unpack(call('ZRANGE', key, '0', '1', 'WITHSCORES'))
    if first == '#' then
      charge.extra, charge.marked, charge.total = -first_at, -first_at, total - 1 - first_at
      first, first_at = second, second_at
    end
    local last, last_at = unpack(call('ZRANGE', key, '-1', '-1', 'WITHSCORES'))
    charge.newest = tonumber(last_at)
    if first and tonumber(first_at) <= now or charge.total + needed > charge.quota then
      charge.ended = ended_of(charge, charge.quota - needed, last)
    end
  end
  return math.max(0, charge.quota - charge.total)
end

local function name_of(charge)
  return pack('<dddd', charge.y, charge.z, charge.x, charge.weight)
end

-- Sets the expiry of the lease.
local function extend(charge)
  local expires = now + charge.x
  call('ZADD', charge.key, expires, name_of(charge))
  charge.newest = math.max(charge.newest, expires)
  call('PEXPIREAT', charge.key, expiry(math.min(charge.newest, now + MOST_AHEAD_US)))
end

-- When slots are free is not known. A key that loses its last member cannot be created again on a node from which its slot is moving.
local function concurrency_wait(charge, cost)
  remove_ended(charge)
  return cost and RETRY_US or 0, math.max(0, math.min(charge.newest - now, MOST_AHEAD_US))
end

local function concurrency_add(charge)
  charge.total, charge.extra = charge.total + charge.weight, charge.extra + charge.weight - 1
  extend(charge)
  local _, reset = concurrency_wait(charge)
  return reset
end

-- What only the driver needs.

-- When the last lease expires.
local function newest_of(charge)
  return tonumber(call('ZRANGE', charge.key, '-1', '-1', 'WITHSCORES')[2])
end

-- The place of the lease among those that have ended, or nil.
local function ended_place(charge)
  local name = name_of(charge)
  for n, member in ipairs(charge.ended) do
    if member == name then
      return n
    end
  end
end

-- When a lease expires, or false if its slots are not held.
local function concurrency_held_until(charge)
  return not ended_place(charge) and call('ZSCORE', charge.key, name_of(charge))
end

-- Renews the lease, which expires at this time, or takes its slots again.
local function concurrency_renew(charge, held_until)
  if not held_until then
    local place = ended_place(charge)
    if place then
      table.remove(charge.ended, place)
    end
    concurrency_add(charge)
  else
    extend(charge)
    remove_ended(charge)
    -- It was the last one, where the clock was set back.
    if tonumber(held_until) > now + charge.x then
      charge.newest = newest_of(charge)
    end
  end
end

-- Ends the lease, and returns the room.
local function concurrency_give_back(charge)
  local is_held = concurrency_held_until(charge)
  if is_held then
    end_all(charge, charge.ended, { name_of(charge) })
  end
  remove_ended(charge)
  if is_held then
    charge.newest = charge.total > 0 and newest_of(charge) or now
  end
  return math.max(0, charge.quota - charge.total)
end
