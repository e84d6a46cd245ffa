-- Decides the runs, request by request.

-- The errors, how many keys belong to requests that were decided, and the run that is decided.
local errors, passed, at_run = nil, 0, 1

local decide_runs

if not single then
  reply = { pack('<d', now), false, false }
  -- How many callers send the next request of a run.
  local function callers_of(run)
    if run.times > 0 then
      return run.times
    end
    local callers = unpack_numbers('<d', ARGV[at_run], run.position + (passed - run.before) / run.size * 8)
    return callers
  end

  local check_alone
  if not rest or #runs > 1 then
    -- Decides checks of one charge, without a call of `pcall` for each.
    function check_alone(run, finish)
      local charge = run.first
      local rule, cost, quota, x, y, z = unpack(charge)
      for n = passed + 1, finish do
        reply[n + 1] = pack('<dddd', rule(keys[n], callers_of(run), nil, cost, quota, x, y, z))
        passed = n
      end
    end
  end

  -- A request whose charges do not decide alone.
  local request = rest
    and {
      times = 0,
      -- For how many callers room is looked for: a refund and the end of a lease need none.
      needs = 0,
      -- How many callers fit the charges so far; the charge that is decided, and the next one, with the number of keys before it.
      fits = 0,
      deciding = false,
      charge = false,
      place = 0,
      -- For a refund: when the request was admitted.
      refunded_at = nil,
      -- A charge of which a ban is in force.
      banned = false,
      -- The place of the next key of a line. Of requests that wait: their process, and its place in the line that they lead, with
      -- the numbers of those that are decided; whether they lead a line, and whether one that has just arrived may wait.
      lines = 0,
      process = 0,
      waiting = nil,
      decided = nil,
      leads = false,
      may_wait = true,
    }

  -- The places that the first of these requests have among them, by their arrivals.
  local function decided_of(waiting, times)
    local decided = {}
    for n = 1, times do
      decided[waiting[2 * n - 1]] = n
    end
    return decided
  end

  local find_keys
  if keys ~= KEYS then
    -- Fails unless this node has all keys of a request whose keys lie in several slots.
    --
    -- A key of a slot that is moving away is found only after a command in its slot (Redis 7.4, Valkey), or in two slots
    -- (Redis 8): so each slot is entered from another one before anything is added. What is found here is found by each later
    -- command.
    function find_keys(run)
      local first = passed + 1
      for place = first, first + run.size - 1 do
        call('PTTL', keys[place])
      end
      call('PTTL', keys[first])
    end
  end

  -- Decides such a request.
  local function decide(run)
    if run.spans then
      find_keys(run)
    end
    local times = callers_of(run)
    request.times, request.fits, request.refunded_at = times, times, run.admitted_at
    request.deciding, request.charge, request.place, request.banned = false, run.first, passed, false
    request.waiting, request.leads, request.may_wait = run.waiting, false, true
    request.needs = (operation == 'refund' or operation == 'end') and 0 or times
    if run.lines > 0 then
      request.lines = #keys - line_keys + run.first_line + (passed - run.before) / run.size * run.lines
      request.process = run.process
      request.decided = run.waiting and decided_of(run.waiting, times)
    end
    -- As after a charge that all callers fit.
    rest(request, 0, times, 0)
    passed = passed + run.size
  end

  for n = 1, #runs do
    local charge, of_run = runs[n].first, runs[n].operation
    while charge do
      local name = charge[C_RULE]
      charge[C_RULE] = of_run == 'reset' and reset_key
        or name == 'log' and sliding_log
        or name == 'counter' and sliding_counter
        or name == 'fixed' and fixed_window
        or name == 'bucket' and token_bucket
        or name == 'concurrency' and concurrency
        or ban
      charge = charge[C_NEXT]
    end
  end

  -- Decides what is left, and returns whether nothing is. A request that fails has added nothing: it is left, or its error is the
  -- reply, and those after it are decided as if it had not been there.
  function decide_runs(replies_with_errors)
    for n = at_run, #runs do
      local run = runs[n]
      at_run, operation = n, run.operation
      run.before = run.before or passed
      local is_joint = operation ~= 'check' or run.size > 1 or run.lines > 0
      local finish = run.before + run.requests * run.size
      while passed < finish do
        local fine, failure = pcall(is_joint and decide or check_alone, run, finish)
        if not fine and not replies_with_errors then
          return false
        elseif not fine then
          errors = errors or {}
          errors[#errors + 1] = failure
          for place = 1, run.size do
            reply[1 + passed + place] = pack('<dddd', -#errors, 0, 0, 0)
          end
          passed = passed + run.size
        end
      end
    end
    return true
  end
end

if decide_runs and not weighted_log and decide_runs(false) then
  return table.concat(reply, '', 1, passed + 1)
end
