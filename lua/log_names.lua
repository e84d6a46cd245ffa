-- The members of a sliding log that is more than a count of equal members.
--
-- The name of a member is `time[;span][~span][:weight][-attempt]`. A weight is written with a letter for its number of digits
-- (`:a5`, `:b10`), so that members of one time are in the order of their weights. With a precision, admissions of one grain of
-- time are one member, scored with the last of them, and `;` is before the time since the first. Charges beyond the limit are
-- merged in the same way, in steps of a fraction of the window, and `~` is before that time.
--
-- Members with scores up to 0 describe the others. `=<window>`: all weigh 1, and are counted. `#<window>`: the score is minus
-- their weight. A member was stored under this window, or under a longer one for which there is `><window>`, whose score is minus
-- the time until which it is needed: no charge removes what counts under another window. Beside longer ones, `+<window>` is in
-- place of `=<window>`, and `*<window>` in place of `#<window>`.

local parts_of, first_at, name_of, put

if sliding_log then
  -- The time of an entry, its weight, its mark, and the number that is behind the mark.
  function parts_of(member)
    local plain_at = tonumber(member)
    if plain_at then
      return plain_at, 1, ''
    end
    local at, mark, number, weight = string.match(member, '^(%d+)([;~]?)(%d*):?%a?(%d*)')
    return tonumber(at) or 0, tonumber(weight) or 1, mark or '', tonumber(number)
  end

  -- The time of the first admission of an entry.
  function first_at(at, mark, number)
    return (mark == ';' or mark == '~') and at - number or at
  end

  -- The name of an entry.
  function name_of(time, mark, number, weight)
    local name = mark == '' and time or time .. mark .. digits(number)
    if weight > 1 then
      local weight_digits = digits(weight)
      name = name .. ':' .. string.char(96 + #weight_digits) .. weight_digits
    end
    return name
  end

  -- Adds an entry, and sets the score of the header; `added` of both are new. An entry of this name may be there already.
  function put(key, score, name, attempt, header_score, header, added)
    local member = name
    while call('ZADD', key, score, member, header_score, header) < added do
      added, attempt = 1, attempt + 1
      member = name .. '-' .. attempt
    end
  end
end
