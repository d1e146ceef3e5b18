# Of HAProxy's configuration as Serve writes it: in a backend with servers on this node, which Serve names by 127.0.0.1,
# those elsewhere become reserves.
function flush(at) {
  for (at = 1; at <= lines; at++) print line[at] (near && far[at] ? " backup" : "")
  if (near) print "    option allbackups"
  lines = near = 0
  split("", far)
}
/^[a-z]/ { flush() }
{ line[++lines] = $0 }
$1 == "server" && $NF != "backup" { if ($3 ~ /^127\.0\.0\.1:/) near = 1; else far[lines] = 1 }
END { flush() }
