package astraflow

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"net"
	"regexp"
	"strconv"
	"strings"
)

const (
	joinPrefix   = "af1."
	maxJoinChars = 65_536
	joinRemedy   = "; ask the server's operator for a new one (`astraflow join-token`)"
)

var (
	addressPattern = regexp.MustCompile(`^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$`)
	headerPattern  = regexp.MustCompile(`^[!-~]*$`)
)

// Join is what a join string says: where a server is, how it proves who it is, and as whom to call it.
type Join struct {
	// Address is HOST:PORT.
	Address string
	// CA holds the certificates, in DER, of the authorities that the server's may come from. Empty with PublicCA.
	CA [][]byte
	// PublicCA says that the server's certificate comes from an authority that this machine trusts anyway.
	PublicCA bool
	// ServerName is the name that the certificate must carry; empty takes the host of the address.
	ServerName string
	// Token is a secret, and so is the string that holds it.
	Token string
}

// IsJoin says whether text is meant as a join string rather than as an address.
func IsJoin(text string) bool {
	return strings.HasPrefix(strings.TrimSpace(text), joinPrefix)
}

// ParseJoin reads a join string; white space around it is ignored, and so are keys that a newer release may add.
// Its errors never repeat the content.
func ParseJoin(text string) (*Join, error) {
	text = strings.TrimSpace(text)
	if !strings.HasPrefix(text, joinPrefix) {
		return nil, newError(InvalidArgument, "a join string begins with '%s'%s", joinPrefix, joinRemedy)
	}
	if len(text) > maxJoinChars {
		return nil, newError(InvalidArgument, "the join string has %d characters, at most %d%s", len(text), maxJoinChars, joinRemedy)
	}
	raw, err := decodeBase64(strings.TrimPrefix(text, joinPrefix), base64.RawURLEncoding)
	if err != nil || !json.Valid(raw) {
		return nil, newError(InvalidArgument, "the join string is damaged or was cut short%s", joinRemedy)
	}
	var content map[string]json.RawMessage
	if json.Unmarshal(raw, &content) != nil || content == nil {
		return nil, newError(InvalidArgument, "the join string holds no JSON object%s", joinRemedy)
	}
	return joinOf(content)
}

func joinOf(content map[string]json.RawMessage) (*Join, error) {
	join := &Join{}
	for key, into := range map[string]*string{
		"address": &join.Address, "server_name": &join.ServerName, "token": &join.Token,
	} {
		// A token is sent as a header, and a name is looked up: neither can hold anything else.
		if !readStrictly(content[key], into) || !headerPattern.MatchString(*into) {
			return nil, newError(InvalidArgument, "%s of the join string must be printable ASCII without spaces%s", key, joinRemedy)
		}
	}
	if !readStrictly(content["public_ca"], &join.PublicCA) {
		return nil, newError(InvalidArgument, "public_ca of the join string must be true or false%s", joinRemedy)
	}
	if !join.readCertificates(content["ca"]) {
		return nil, newError(InvalidArgument, "ca of the join string must be a list of base64 DER certificates%s", joinRemedy)
	}
	if err := requireAddress(join.Address); err != nil {
		return nil, err
	}
	if (len(join.CA) > 0) == join.PublicCA {
		which := "neither ca nor public_ca"
		if join.PublicCA {
			which = "both ca and public_ca"
		}
		return nil, newError(InvalidArgument, "the join string names %s: exactly one says whom to trust%s", which, joinRemedy)
	}
	return join, nil
}

func (join *Join) readCertificates(raw json.RawMessage) bool {
	var encoded []string
	if !readStrictly(raw, &encoded) {
		return false
	}
	for _, each := range encoded {
		der, err := decodeBase64(each, base64.RawStdEncoding)
		// Every certificate is a DER sequence of two length bytes at least.
		if err != nil || len(der) < 5 || der[0] != 0x30 {
			return false
		}
		join.CA = append(join.CA, der)
	}
	return true
}

// pool returns the authorities as TLS wants them; none stands for those of this machine.
func (join *Join) pool() (*x509.CertPool, error) {
	if join.PublicCA {
		return nil, nil
	}
	pool := x509.NewCertPool()
	for _, der := range join.CA {
		certificate, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, newError(InvalidArgument, "ca of the join string holds no certificate: %v%s", err, joinRemedy)
		}
		pool.AddCert(certificate)
	}
	return pool, nil
}

// readStrictly reads a value that may be absent, but not null.
func readStrictly(raw json.RawMessage, into interface{}) bool {
	return raw == nil || (string(raw) != "null" && json.Unmarshal(raw, into) == nil)
}

func decodeBase64(text string, encoding *base64.Encoding) ([]byte, error) {
	// The decoder skips line ends, which no join string has.
	if strings.ContainsAny(text, "\r\n") {
		return nil, base64.CorruptInputError(strings.IndexAny(text, "\r\n"))
	}
	return encoding.DecodeString(strings.TrimRight(text, "="))
}

func requireAddress(address string) error {
	parts := addressPattern.FindStringSubmatch(address)
	if parts != nil {
		if port, _ := strconv.Atoi(parts[2]); port >= 1 && port <= 65_535 {
			return nil
		}
	}
	return newError(InvalidArgument, "address '%s' must be HOST:PORT with a port of 1-65535: 127.0.0.1:7070, [::1]:7070", address)
}

// isLoopback says whether only this machine can reach the host of address.
func isLoopback(address string) bool {
	host, _, _ := net.SplitHostPort(address)
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}
