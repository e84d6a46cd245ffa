-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- Members weigh 1 until a heavier one is added: that one ends in `:weight`, and from then on a member `#`, kept at
-- rank 0, has minus the total weight as its score. Where a grain is given, admissions of one grain of time are one
-- member, scored with the last of them.

local log = {}
algorithms.log = log

function log.limit(take)
  local quota, window, grain = take(), take(), take()

  return {
    quota = quota,
    window = window,
    grain = grain,
    slack = math.min(SLACK, window),
    expired = text(now - window),
    live = '(' .. text(now - window),
  }
end

local function weight_of(member)
  return tonumber(string.match(member, ':(%d+)$') or 1)
end

local function drop(state, first, last)
  if state.weighted then
    local dropped = 0
    for _, member in ipairs(call('ZRANGE', state.key, first, last)) do
      dropped = dropped + weight_of(member)
    end
    call('ZINCRBY', state.key, text(dropped), '#')
    state.total = state.total - dropped
  end

  call('ZREMRANGEBYRANK', state.key, first, last)
  state.stored = state.stored - (last - first + 1)
  state.budget = state.budget - (last - first + 1)
end

-- Drops what has expired and what a clock that is gone has left, oldest and newest first, within the budget.
local function settle(state, limit)
  local live = state.total
  local total = call('ZSCORE', state.key, '#')
  if total then
    state.weighted, state.total = true, -tonumber(total)
    state.stored = state.stored - 1
    if live == state.stored then
      return
    end
  end
  local base = state.weighted and 1 or 0
  local latest = text(now + limit.slack)

  state.late = call('ZCOUNT', state.key, '0', limit.expired)
  local dropped = math.min(state.late, state.budget - 2)
  if dropped > 0 then
    drop(state, base, base + dropped - 1)
    state.late = state.late - dropped
  end

  local gone = call('ZCOUNT', state.key, '(' .. latest, '+inf')
  dropped = math.min(gone, state.budget - 2)
  if dropped > 0 then
    drop(state, -dropped, -1)
    gone = gone - dropped
  end

  if state.weighted and state.stored == 0 then
    call('DEL', state.key)
    state.weighted, state.total = false, 0
  end
  if not state.weighted then
    state.total = state.stored - state.late - gone
  end
  state.ahead = call('ZCOUNT', state.key, '(' .. now_text, latest) > 0
end

function log.open(key, limit)
  local state = { key = key, total = 0, stored = 0, late = 0, budget = BOUND, weighted = false, ahead = false }
  state.stored = call('ZCARD', key)
  if state.stored == 0 then
    return state
  end

  -- In the plain case every member weighs 1 and lies within the window.
  state.total = call('ZCOUNT', key, limit.live, now_text)
  if state.total ~= state.stored then
    settle(state, limit)
  end
  return state
end

function log.room(state, limit)
  return math.max(0, limit.quota - state.total)
end

-- Adds a member at `at`, whatever else was added at that time, and writes the total down.
local function insert(state, at, weight)
  local score = text(at)
  local suffix = weight > 1 and ':' .. text(weight) or ''
  local total = state.weighted and text(-state.total)

  -- A member of that name has that score, so adding it again changes nothing. Each attempt has another name, and there
  -- are no more than `stored` to meet.
  local member, attempt = score .. suffix, state.stored
  while
    (total and call('ZADD', state.key, score, member, total, '#') or call('ZADD', state.key, score, member)) == 0
  do
    attempt = attempt + 1
    member = score .. '-' .. text(attempt) .. suffix
  end
end

function log.add(state, limit, weight)
  -- Beyond the limit, which only charges go, all are one member: no flood of them makes the log longer.
  local beyond = state.stored > 0 and state.total >= limit.quota
  if (weight > 1 or limit.grain > 0 or beyond) and not state.weighted then
    call('ZADD', state.key, text(-state.stored), '#')
    state.weighted, state.total = true, state.stored
  end
  weight = math.max(1, math.min(weight, MAX_TOTAL - state.total))
  state.total = state.total + weight

  local first, last
  if limit.grain > 0 then
    first = now - now % limit.grain
    last = first + limit.grain - 1
  elseif beyond then
    first = tonumber(call('ZRANGE', state.key, -1, -1, 'WITHSCORES')[2])
    last = first
  end

  local at, merged = now, 0
  if first then
    local entries =
      call('ZREVRANGEBYSCORE', state.key, text(last), text(first), 'WITHSCORES', 'LIMIT', '0', text(state.budget - 1))
    for i = 1, #entries, 2 do
      at = math.max(at, tonumber(entries[i + 1]))
      merged = merged + weight_of(entries[i])
      call('ZREM', state.key, entries[i])
      state.stored = state.stored - 1
    end
  end
  insert(state, at, merged + weight)
  call('PEXPIRE', state.key, ttl(limit.window))

  state.stored = state.stored + 1
  state.added = true
end

-- The wait until the entry leaves that frees enough weight, or, past the budget, the last one looked at.
function log.wait(state, limit, cost)
  local need = math.min(state.total + cost - limit.quota, state.total)
  if need <= 0 then
    return limit.window
  end
  keep(state.key, limit.window)

  local at
  if state.weighted then
    local entries = call('ZRANGE', state.key, 1, state.budget - 1, 'WITHSCORES')
    for i = 1, #entries, 2 do
      at = tonumber(entries[i + 1])
      need = need - weight_of(entries[i])
      if need <= 0 then
        break
      end
    end
  else
    local rank = state.late + need - 1
    at = tonumber(call('ZRANGE', state.key, rank, rank, 'WITHSCORES')[2])
  end
  return math.max(1, at + limit.window - now)
end

-- The wait until the newest entry leaves.
function log.reset(state, limit)
  if state.added and not state.ahead then
    return limit.window
  end

  local latest = text(now + limit.slack)
  local newest = call('ZREVRANGEBYSCORE', state.key, latest, limit.live, 'WITHSCORES', 'LIMIT', '0', '1')[2]
  return newest and tonumber(newest) + limit.window - now or 0
end

-- Takes weight back from what was added at that time, as far as it still counts.
function log.refund(state, limit, at, weight)
  local first, last = at, at
  if limit.grain > 0 then
    first = at - at % limit.grain
    last = first + limit.grain - 1
  end
  local low, left = math.max(first, now - limit.window + 1), weight
  local entries =
    call('ZRANGEBYSCORE', state.key, text(low), text(last), 'WITHSCORES', 'LIMIT', '0', text(state.budget - 1))

  for i = 1, #entries, 2 do
    local held = weight_of(entries[i])
    local taken = math.min(left, held)
    if taken == 0 then
      break
    end
    call('ZREM', state.key, entries[i])
    state.total = state.total - taken
    left = left - taken
    if held > taken then
      insert(state, tonumber(entries[i + 1]), held - taken)
    else
      state.stored = state.stored - 1
      if state.weighted then
        call('ZINCRBY', state.key, text(taken), '#')
      end
    end
  end

  if state.weighted and state.stored == 0 then
    call('DEL', state.key)
  end
end
