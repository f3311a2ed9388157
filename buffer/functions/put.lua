-- Opening tables, adding chunks, writing columns. The payload is in the server before the function runs (same
-- transaction); a refused call unlinks it again.

local function same_shape(a, b)
  return a.scope == b.scope and a.ended == b.ended and table.concat(a.needs, ',') == table.concat(b.needs, ',')
    and a.selector == b.selector
end

-- open(schema fingerprint, random number, client, worker, columns, limits, stage...): create the table or compare; new
-- stages are added. The number names this state of the configuration. Replies {"ok", {columns, limits, stage...}, {index of
-- each stage that has live rows to adopt...}}, {"schema", theirs} or {"shape", name of the stage}.
register('open', function(keys, args)
  local prefix = keys[1]
  local packed, known, added = redis.call('GET', prefix .. KEY.config), {}, {}
  local blobs, changed, remade = {args[5], args[6]}, false, {}
  if packed then
    blobs = cmsgpack.unpack(packed)
    local theirs = cmsgpack.unpack(blobs[1]).schema
    if theirs ~= args[1] then return {'schema', theirs} end
    if blobs[2] ~= args[6] then blobs[2], changed = args[6], true end
    for k = 3, #blobs do known[cmsgpack.unpack(blobs[k]).name] = k end
  end
  for k = 7, #args do
    local stage = cmsgpack.unpack(args[k])
    local at = known[stage.name]
    if not at then
      blobs[#blobs + 1], changed = args[k], true
      if packed then added[#added + 1] = #blobs - 2 end
    elseif blobs[at] ~= args[k] then
      local theirs = cmsgpack.unpack(blobs[at])
      if not same_shape(stage, theirs) then return {'shape', stage.name} end
      if (stage.min_batch > 1) ~= (theirs.min_batch > 1) then remade[#remade + 1] = at - 2 end
      blobs[at], changed = args[k], true
    end
  end
  if changed then
    local old = packed and open_table(keys)
    local state, fields = {}, base_of(#blobs - 1)
    for k = 1, fields do state[k] = old and old.state[k] or 0 end
    if old then
      for k = old.config.fields + 1, fields do state[k] = 0 end
      for _, i in ipairs(added) do state[base_of(i) + PAST] = state[ENDED] end
    else
      state[DUE] = math.huge
    end
    state[VERSION] = args[2]
    redis.call('SET', prefix .. KEY.config, cmsgpack.pack(blobs))
    redis.call('SET', prefix .. KEY.state, struct.pack('<' .. string.rep('d', fields), unpack(state, 1, fields)))
    for _, i in ipairs(remade) do  -- `adopt` fills them anew
      unlink({prefix .. KEY.open .. i, prefix .. KEY.since .. i})
      added[#added + 1] = i
    end
  end
  redis.call('HSET', prefix .. KEY.clients, args[3], args[4])
  return {'ok', blobs, added}
end, 'allow-oom')

-- attach(): {"ok", {columns, limits, stage...}}.
register('attach', function(keys)
  local packed = redis.call('GET', keys[1] .. KEY.config)
  if not packed then return {'unknown'} end
  return {'ok', cmsgpack.unpack(packed)}
end, 'no-writes')

-- adopt(chunk...): rows of these chunks meet the stages that were added, or took up min_batch, after them. {"ok"}.
of_table('adopt', function(t, args)
  for _, id in ipairs(args) do
    local chunk = chunk_of(t, id)
    if chunk then
      chunk.dirty = true
      move(t, chunk, all_rows(chunk), 'settle', to_settled)
      join(t, chunk)
      for i, stage in ipairs(t.stages) do
        local at = t.config.pos[i]
        if stage.min_batch > 1 and (has(chunk.runs, at, 119) or has(chunk.runs, at, 99)) then
          zadd(t, t.prefix .. KEY.open .. i, chunk.ordinal, id)
        end
        if stage.min_batch > 1 and has(chunk.runs, at, 114) then zadd(t, t.prefix .. KEY.since .. i, t.now, id) end
      end
    end
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- Pieces in the arguments: {chunk, unit, number, {name, first, count, bytes, entry}...}..., those of one chunk and unit together and in
-- order of their rows. An entry is a piece as the chunk's record names it, name:first:count:bytes; there
-- ":milliseconds after the put" and `told`, ":version:tag;", follow.
local PIECE = 5

-- Call fn(chunk, unit, index of the first piece, number of pieces).
local function each_group(args, at, fn)
  while at <= #args do
    local number = args[at + 2]
    fn(args[at], args[at + 1], at + 3, number)
    at = at + 3 + PIECE * number
  end
end

-- Unlink the payload that came with a call which is refused.
local function refuse(prefix, args, at, reply)
  local names = {}
  each_group(args, at, function(id, unit, from, number)
    for k = from, from + PIECE * (number - 1), PIECE do names[#names + 1] = payload_key(prefix, id, unit, args[k]) end
  end)
  unlink(names)
  return reply
end

-- Unlink pieces that no chunk refers to: those of a repeated call.
local function drop_unreferenced(t, args, at)
  local names = {}
  each_group(args, at, function(id, unit, from, number)
    local chunk = chunk_of(t, id)
    for k = from, from + PIECE * (number - 1), PIECE do
      local held = chunk and string.find(';' .. chunk.pieces[unit], ';' .. args[k] .. ':', 1, true)
      if not held then names[#names + 1] = payload_key(t.prefix, id, unit, args[k]) end
    end
  end)
  unlink(names)
end

-- Unlink pieces of a unit that new ones, at these ranges, replace wholly. Returns the entries of the others, and the bytes of the
-- replaced ones.
local function keep_visible(t, chunk, unit, own, ranges)
  local left, replaced, bytes = {}, {}, 0
  for one in string.gmatch(chunk.pieces[unit], '[^;]+;') do
    local name, from, rows, size = string.match(one, '^([^:]*):(%d+):(%d+):(%d+)')
    local stop = from + rows
    from = tonumber(from)
    local gone = own[name]
    for k = 1, gone and 0 or #ranges, 2 do
      if from >= ranges[k] and stop <= ranges[k] + ranges[k + 1] then
        gone = true
        replaced[#replaced + 1] = payload_key(t.prefix, chunk.id, unit, name)
        break
      end
    end
    if gone then bytes = bytes + size else left[#left + 1] = one end
  end
  unlink(replaced)
  return table.concat(left), bytes
end

-- Enter pieces of one unit in the chunk: what they replace wholly is unlinked, their rows have the unit's columns from now on.
local function enter(t, chunk, unit, args, from, number, told)
  local ranges, entries, own, bytes = {}, {}, {}, 0
  local rest = ':' .. t.now - chunk.at .. told
  for k = 1, number do
    local at = from + PIECE * (k - 1)
    own[args[at]] = true
    ranges[2 * k - 1], ranges[2 * k] = args[at + 1], args[at + 2]
    bytes = bytes + args[at + 3]
    entries[k] = args[at + 4] .. rest
  end
  local text = number == 1 and entries[1] or table.concat(entries)
  if chunk.pieces[unit] ~= '' then
    local left, replaced_bytes = keep_visible(t, chunk, unit, own, ranges)
    text, bytes = left .. text, bytes - replaced_bytes
  end
  chunk.pieces[unit] = text
  chunk.bytes = chunk.bytes + bytes
  chunk.dirty = true
  t.state[BYTES] = t.state[BYTES] + bytes
  move(t, chunk, ranges, t.config.unit_moves[unit], to_present, unit)
end

-- The ordinary stage with most rows to do: it must drain when the table is full.
local function slowest_stage(t)
  local worst, most = '', -1
  for i, stage in ipairs(t.stages) do
    local rows = stage_state(t, i, READY) + stage_state(t, i, LEASED)
    if not stage.ended and rows > most then worst, most = stage.name, rows end
  end
  return worst, most
end

-- Rows that the batch log knew before the server did: it came back older, and the chunk was put again.
local function end_logged(t, chunk)
  if t.state[LOGGED] == 0 then return end
  local at = t.prefix .. KEY.logged
  local noted = redis.call('HGET', at, chunk.id)
  if not noted then return end
  redis.call('HDEL', at, chunk.id)
  t.state[LOGGED] = t.state[LOGGED] - 1
  for stage, first, count, use, step in string.gmatch(noted, '(%d+):(%d+):(%d+):(%d+):(%d+);') do
    use_rows(t, chunk, {tonumber(first), tonumber(count)}, tonumber(stage), tonumber(step), tonumber(use))
  end
end

-- The signature of rows that are put with these units ("put1,2,"); it is remembered under their names.
local function new_rows(config, units)
  local sig = config.blank
  for unit in string.gmatch(units, '%d+') do sig = to_present(config, sig, tonumber(unit)) end
  for _, i in ipairs(config.grouped) do
    if not config.stages[i].group_deadline_ms then sig = to_joined(config, sig, i) or sig end
  end
  count_learnt(config)
  config.memo[units] = sig
  return sig
end

-- Sequences are decimal text: they are compared as often as they are stored.
local function reaches(a, b) return #a > #b or (#a == #b and a >= b) end

-- put(schema fingerprint, producer, sequence, the client's last one, chunk, rows, group size, 1 to close, version, tokens, told, pieces...),
-- with one piece of all rows for each unit that is there: {"ok", live rows}, {"known", last sequence}, {"schema", theirs},
-- {"older", last sequence known}, or {"full", limit, value, most, stage, rows it has to do}.
of_table('put', function(t, args)
  local state, config, prefix = t.state, t.config, t.prefix
  if config.schema ~= args[1] then return refuse(prefix, args, 12, {'schema', config.schema}) end
  local id, rows = args[5], args[6]
  local mark = redis.call('HGET', t.key.marks, args[2])
  if mark and reaches(mark, args[3]) then
    drop_unreferenced(t, args, 12)
    return {'known', mark}
  end
  if args[4] ~= '' and args[4] ~= mark then return refuse(prefix, args, 12, {'older', mark or 'none'}) end
  local bytes, pieces, units, rest = 0, {unpack(config.no_pieces)}, 'put', ':0' .. args[11]
  for k = 13, #args, 3 + PIECE do
    local unit = args[k]
    bytes, pieces[unit], units = bytes + args[k + 5], args[k + 6] .. rest, units .. config.unit_names[unit]
  end
  local limit = put_limit(t, rows, bytes)
  if limit then
    local stage, todo = slowest_stage(t)
    local value, most = string.format('%.17g', limit[2]), string.format('%.17g', limit[3])
    return refuse(prefix, args, 12, {'full', limit[1], value, most, stage, todo})
  end
  redis.call('HSET', t.key.marks, args[2], args[3])
  state[ORDINAL] = state[ORDINAL] + 1
  state[ADMITTED] = state[ADMITTED] + rows
  state[BYTES] = state[BYTES] + bytes
  local chunk = {
    runs = {rows, args[9] ~= '' and args[9] or -1, config.memo[units] or new_rows(config, units)}, n = rows, group = args[7],
    ordinal = state[ORDINAL], bytes = bytes, at = t.now, last = -1, why = '', tokens = args[10], pieces = pieces,
    id = id, before = NONE, counted = false, rest = false, dirty = true, ends = false,
  }
  t.chunks[id] = chunk
  t.order[1], config.usual_rows = chunk, rows
  if config.timed[1] then join(t, chunk) end
  if args[8] == 1 then state[CLOSED] = state[ORDINAL] end
  end_logged(t, chunk)
  commit(t)
  return {'ok', live_rows(t)}
end, nil, function(prefix, args) return refuse(prefix, args, 12, {'unknown'}) end)

-- flush(): the rows put so far are complete.
of_table('flush', function(t, args)
  t.state[CLOSED] = t.state[ORDINAL]
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- set_version(version): the trainer's; it only grows.
of_table('set_version', function(t, args)
  t.state[TRAINER] = math.max(t.state[TRAINER], args[1])
  t.roomier = true
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- write(slot, serial, call, 1 to ack, version, tokens, told, pieces...): {"ok"} or {"fenced"}. Tokens are those of the lease's rows in
-- order.
of_table('write', function(t, args)
  local held, ack, version, tokens = lease_of(t, args[1], args[2]), args[4] == 1, args[5], args[6]
  if held and held.over and held.call == args[3] then
    drop_unreferenced(t, args, 8)
    return {'ok'}
  end
  if not held or held.over then
    t.state[FENCED] = t.state[FENCED] + 1
    commit(t)
    return refuse(t.prefix, args, 8, {'fenced'})
  end
  local orphans, f = {}, held.fields
  if f[8] then
    local ids = {}
    for k = 5, #f, 3 do ids[#ids + 1] = f[k] end
    prefetch(t, ids, 1, #ids)
  end
  each_group(args, 8, function(id, unit, from, number)
    local chunk = chunk_of(t, id)
    if chunk then
      enter(t, chunk, unit, args, from, number, args[7])
    else
      for k = from, from + PIECE * (number - 1), PIECE do orphans[#orphans + 1] = payload_key(t.prefix, id, unit, args[k]) end
    end
  end)
  if orphans[1] then unlink(orphans) end
  if tokens ~= '' then
    local at = 0
    for k = 5, #f, 3 do
      local chunk, count = chunk_of(t, f[k]), f[k + 2]
      if chunk then set_tokens(chunk, f[k + 1], string.sub(tokens, 4 * at + 1, 4 * (at + count))) end
      at = at + count
    end
  end
  each_chunk(t, f, 5, function(chunk, ranges)
    if version ~= '' then set_version(chunk, ranges, version) end
    if ack then ack_rows(t, chunk, held.stage, ranges) end
    join(t, chunk)
  end)
  if ack then end_lease(t, held, args[3]) end
  commit(t)
  return {'ok'}
end, nil, function(prefix, args) return refuse(prefix, args, 8, {'unknown'}) end)
