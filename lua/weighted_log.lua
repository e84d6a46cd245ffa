-- The rule of a sliding log that is more than a count of equal members: it has weights, a precision, reservations, charges
-- beyond its limit, or entries of several windows.

-- Makes the rule.
local function make_weighted_log()
  local at_rank, weight_of, read, describe, simplify, remove, insert, remove_expired, skip_older_than = make_log_entries()
  -- Made when a charge needs them.
  local windows, reservations, merges

  -- Finds what counts, and removes what no longer does.
  local function advance(log, quota, weight, window, exact)
    log.longest = math.max(window, log.window)
    if #log.longer > 0 then
      windows = windows or make_log_windows(at_rank, describe)
      windows.expire(log)
    end
    if log.stored == 0 then
      return
    end
    remove_expired(log, exact)
    if operation == 'peek' or log.longest > window or log.kind == '=' then
      skip_older_than(log, window)
    end
    -- A charge that fits does not remove entries that are ahead of the clock.
    if math.max(0, quota - log.total) >= weight then
      return
    end
    log.gone = call('ZCOUNT', log.key, '(' .. digits(now + math.min(SLACK, log.longest)), '+inf')
    if log.gone > 0 then
      reservations = reservations
        or make_log_reservations(at_rank, weight_of, simplify, remove, insert, skip_older_than)
      reservations.forget(log, window, exact)
    end
  end

  -- Stores the window of an entry that is added at this time.
  local function store_window(log, window, at)
    if window ~= log.window then
      windows = windows or make_log_windows(at_rank, describe)
      windows.store(log, window, at)
    end
  end

  -- Sets the expiry to the time when the last entry does not count under any window.
  local function set_expiry(log, window)
    local til = now + window
    if log.kind == '@' then
      til = math.max(til, parts_of(at_rank(log, -1)) + log.window)
    end
    for _, longer in ipairs(log.longer) do
      til = math.max(til, longer[2])
    end
    call('PEXPIREAT', log.key, expiry(til))
  end

  -- The weight that is stored for some callers: a debt is bounded, and what fits is stored in full beside a debt under a longer
  -- window.
  local function bounded(log, counted, cost, quota)
    local fits = math.min(counted, math.floor(math.max(0, quota - log.total) / cost))
    local debts, debt = counted - fits, math.max(0, MAX_TOTAL - log.weight - fits * cost)
    return fits * cost + math.max(debts, math.min(debts * cost, debt))
  end

  -- Adds the weight of an admission, or of a charge.
  local function add(log, counted, cost, quota, window, grain)
    local beyond = grain == 0 and log.stored > 0 and log.total >= quota
    store_window(log, window, now)
    local weight = counted * cost
    local are_equal = log.kind == '=' and cost == 1 and counted <= FEW and grain == 0 and not beyond
    if not are_equal and log.weight + weight > MAX_TOTAL then
      weight = bounded(log, counted, cost, quota)
    end
    log.weight, log.total = log.weight + weight, log.total + weight
    if are_equal then
      describe(log)
      admit(log.key, counted, log.stored)
      log.stored = log.stored + counted
      return
    end
    log.kind = log.kind == '=' and '#' or log.kind
    if grain > 0 or beyond then
      merges = merges or make_log_merges(insert)
      merges.merge(log, weight, grain > 0 and grain or math.ceil(window / STEPS), beyond)
    else
      insert(log, now, '', 0, weight)
    end
  end

  -- Decides a charge of any log.
  local function decide(key, times, rest, cost, quota, window, grain, _, request, members)
    local log = read(key, members)
    advance(log, quota, times * cost, window, grain == 0)
    local room, counted = math.max(0, quota - log.total), times
    if room < times * cost then
      counted = (room - room % cost) / cost
    end
    local is_denied, refunded_at, own_turn = counted < times, nil, nil
    if rest then
      if operation == 'reserve' and is_denied and grain == 0 and log.late + log.gone == 0 then
        local need = log.total + cost - quota
        own_turn = turn_of(request, need, cost, quota, wait_of_log, log, cost, quota, window, true)
      end
      counted, is_denied, refunded_at = rest(request, room, counted, cost, quota, own_turn)
    end

    if counted > 0 and rest and request.turn > now and grain == 0 then
      store_window(log, window, request.turn)
      reservations = reservations
        or make_log_reservations(at_rank, weight_of, simplify, remove, insert, skip_older_than)
      reservations.reserve(log, request.turn, cost)
      set_expiry(log, window)
      return counted, math.max(0, room - cost), now - request.turn, reset_of_log(log, window)
    elseif refunded_at and log.stored > 0 then
      merges = merges or make_log_merges(insert)
      merges.refund(log, refunded_at, cost, window, grain)
      room = math.max(0, quota - log.total)
    elseif counted > 0 then
      add(log, counted, cost, quota, window, grain)
      set_expiry(log, window)
      room = math.max(0, room - counted * cost)
    elseif is_denied then
      keep(key, now + log.longest)
    end

    local is_reset = counted > 0 and log.kind ~= '@'
    local wait = is_denied and wait_of_log(log, cost, quota, window) or 0
    return counted, room, wait, is_reset and window or reset_of_log(log, window)
  end

  return decide
end
