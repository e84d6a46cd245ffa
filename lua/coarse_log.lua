-- Sliding window log with a precision: the admissions of one grain of time are one entry, which expires with the last of them.

-- Makes the rule for a check of a log with the header `#<window>`, as most have: its entries were stored under this window alone.
-- `weighted_log` decides the others, and logs with entries ahead of the clock.
local function make_coarse_log(weighted_log)
  -- What the entries weigh that have expired.
  local function expired_of(key, text)
    local weight = 0
    for _, member in ipairs(call('ZRANGEBYSCORE', key, '(0', text.expired)) do
      local _, one = parts_of(member)
      weight = weight + one
    end
    return weight
  end

  -- Merges weight with the entries of this grain, of which the newest is one; returns it with theirs, and the first admission.
  local function merge(key, weight, newest, count, grain, text)
    local first, begin, members = now, now - now % grain, { newest }
    if call('ZRANGE', key, '-2', '-2')[1] >= text.begin then
      members = call('ZREVRANGEBYSCORE', key, now_text, text.begin, 'LIMIT', '0', BUDGET - count - 1)
    end
    for _, member in ipairs(members) do
      local at, merged, mark, number = parts_of(member)
      local earliest = first_at(at, mark, number)
      -- An entry of another precision may begin before the grain: merged, it would expire too late.
      if earliest >= begin then
        first, weight = math.min(first, earliest), weight + merged
        call('ZREM', key, member)
      end
    end
    return weight, first
  end

  -- The wait of a denied charge.
  local function wait_of(key, total, count, cost, quota, window)
    keep(key, now + window)
    local log = { key = key, kind = '#', headers = 1, skipped = 0, weight = total, total = total }
    log.stored, log.budget = call('ZCARD', key) - 1, BUDGET - count
    return wait_of_log(log, cost, quota, window)
  end

  -- Decides a check.
  local function decide(key, times, rest, cost, quota, window, grain, text, request, members)
    if grain == 0 or operation ~= 'check' then
      return weighted_log(key, times, rest, cost, quota, window, grain, text, request, members)
    end
    local weight = tonumber(call('ZSCORE', key, text.header) or nil)
    local newest, count, decides = nil, 0, not weight and call('ZCARD', key) == 0
    if weight and weight <= 0 and weight > -EXACT then
      -- 1. Find what has expired.
      count, newest = call('ZCOUNT', key, '(0', text.expired), call('ZRANGE', key, '-1', '-1')[1]
      decides = count <= BUDGET - 2 and string.sub(newest, 1, #now_text) <= now_text
    end
    if not decides then
      return weighted_log(key, times, rest, cost, quota, window, grain, text, request)
    end
    local expired = count > 0 and expired_of(key, text) or 0

    -- 2. Count, and 3. compare with the limit.
    local total = math.max(0, -(weight or 0) - expired)
    local room, counted = quota > total and quota - total or 0, times
    if room < times * cost then
      counted = (room - room % cost) / cost
    end
    local is_denied = counted < times
    if rest then
      counted, is_denied = rest(request, room, counted, cost, quota)
    end
    -- 4. Remove what has expired, and add.
    if count > 0 then
      call('ZREMRANGEBYSCORE', key, '(0', text.expired)
    end
    if counted > 0 then
      local added, first = counted * cost, now
      total, room = total + added, room - added
      if newest and newest >= text.begin then
        added, first = merge(key, added, newest, count, grain, text)
      end
      local name = name_of(now_text, first < now and ';' or '', now - first, added)
      put(key, now_text, name, 0, -total, text.header, newest and 1 or 2)
      -- 5. Set the expiry.
      call('PEXPIREAT', key, text.expires)
    elseif count > 0 then
      call('ZADD', key, -total, text.header)
    end
    local wait = is_denied and wait_of(key, total, count, cost, quota, window) or 0
    local reset = counted > 0 and window or total > 0 and math.max(0, parts_of(newest) + window - now) or 0
    return counted, room, wait, reset
  end

  return decide
end
